"""Local SGD against a loop in one process: a model and an optimizer for each rank, averaged by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_strategies import LocalSGD
from hocket_testkit import StrategyConformance, run_ranks


def shares(samples: int, ranks: int) -> list[slice]:
    """Contiguous shares of a batch, the larger ones first."""
    sizes = [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]
    starts = [sum(sizes[:rank]) for rank in range(ranks)]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def train(
    make_model, make_optimizer, batches, loss, *, ranks, every, epochs=1, warmup=0, clip=None, average_momenta=False
):
    """The averaged weights at the end, and the mean loss of each global batch.

    Momenta are SGD's. In the warm-up a model steps with the gradient of the global batch. "average" among the batches
    stands for the end of a fit.
    """
    models = [make_model() for _ in range(ranks)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    optimizers = [make_optimizer(list(model.parameters())) for model in models]
    losses, steps, since = [], 0, 0
    for _ in range(epochs):
        for batch in batches:
            if batch == "average":
                average(models, [])
                since = 0
                continue
            inputs, targets = batch
            local = steps >= warmup
            mean = 0.0
            for model, optimizer, mine in zip(models, optimizers, shares(len(inputs), ranks), strict=True):
                value = loss(model(inputs[mine]), targets[mine]) if len(inputs[mine]) else torch.zeros(())
                mean += value.item() * len(inputs[mine])
                if not local:
                    mine, value = slice(None), loss(model(inputs), targets)
                if len(inputs[mine]):
                    optimizer.zero_grad()
                    value.backward()
                    if clip is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
            losses.append(mean / len(inputs))
            steps, since = steps + 1, since + local
            if since == every:
                since = 0
                average(models, optimizers if average_momenta else [])
    average(models, optimizers if average_momenta else [])
    return dict(models[0].state_dict()), losses


@torch.no_grad()
def average(models, optimizers):
    for tensors in zip(*(list(model.parameters()) + list(model.buffers()) for model in models), strict=True):
        if tensors[0].is_floating_point():
            mean = sum(tensors) / len(tensors)
            for tensor in tensors:
                tensor.copy_(mean)
    for parameters in zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True) if optimizers else ():
        states = [o.state[p] for o, p in zip(optimizers, parameters, strict=True)]
        known = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
        mean = sum(known) / len(known)
        for state in states:
            state["momentum_buffer"] = mean.clone()


class TestLocalSGD(StrategyConformance):
    """Two steps from average to average; the momenta are averaged too, so that a loaded state goes on exactly."""

    exempt = {
        "test_trains_a_task_of_two_steps": "between averages ranks train otherwise than one process; see the warm-up"
    }

    def make(self):
        return LocalSGD(every=2, average_optimizer=True)

    def reference(self, clip, epochs=2):
        batches = list(self.seeded(self.data))
        return train(
            lambda: self.seeded(self.model).double(), self.optimizer, batches, F.cross_entropy,
            ranks=self.world_size, every=2, epochs=epochs, clip=clip, average_momenta=True,
        )  # fmt: skip


@pytest.mark.long
class TestLocalSGDOnFourRanks(TestLocalSGD):
    world_size = 4


@pytest.mark.long
class TestLocalSGDInItsWarmUp(StrategyConformance):
    """Until the warm-up is over it is data parallelism: the weights of one process."""

    def make(self):
        return LocalSGD(every=3, warmup="1000ba")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(number, 4, generator=generator).double()
    return TensorDataset(features, torch.randint(3, (number,), generator=generator))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def trainer(folder, data, strategy, **options) -> hocket.Trainer:
    return hocket.Trainer(
        **{
            "model": network(),
            "loss": F.cross_entropy,
            "train_data": data,
            "global_batch": 4,
            "optimizer": sgd,
            "strategy": strategy,
            "device": "cpu",
            "duration": "3ep",
            "folder": folder,
            **options,
        }
    )


class Losses(hocket.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def batch_end(self, state):
        self.losses.append(state.loss.item())


def close(got, expected, tolerance=1e-11):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_uneven_shares_with_batch_norm(tmp_path, every, world_size):
    """11 samples on 2 or 3 ranks, so that shares differ in size; statistics of batch norm are averaged with the weights."""
    batches = [tuple(samples(11).tensors), tuple(samples(8).tensors)]

    def rank_main(rank):
        losses = Losses()
        run = trainer(tmp_path, DataLoader(samples(11)), LocalSGD(every=every), callbacks=[losses], global_batch=11)
        run.fit("2ep")
        run.fit(DataLoader(samples(8)), duration="2ep")
        return run.model_state_dict(), losses.losses, dict(run.state.model.state_dict())

    # The second fit begins from the average, each rank with its own momenta: by hand that is one run of four steps.
    schedule = [batches[0], batches[0], "average", batches[1], batches[1]]
    expected, losses = train(network, sgd, schedule, F.cross_entropy, ranks=world_size, every=every)
    for weights, seen, held in run_ranks(rank_main, world_size):
        close(weights, expected)
        close(held, expected)
        assert seen == pytest.approx(losses, rel=1e-10)


def test_warm_up_then_local_steps(tmp_path):
    """Five synchronous steps, then three local ones, an average, and one more until the end of the fit."""

    def rank_main(rank):
        torch.manual_seed(rank)
        run = trainer(tmp_path, DataLoader(samples(12), 4), LocalSGD(every=3, warmup="5ba"), model=plain())
        run.fit()
        return run.model_state_dict()

    expected, _ = train(
        plain, sgd, list(DataLoader(samples(12), 4)), F.cross_entropy, ranks=2, every=3, warmup=5, epochs=3
    )
    for weights in run_ranks(rank_main, 2):
        close(weights, expected)


def plain() -> nn.Module:
    """Without batch norm, whose gradient on a share is not that on the batch."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("warmup, local", [("1ep", 6), ("0.5dur", 4), ("12sp", 6), ("0ba", 9)])
def test_warm_up_in_any_unit(tmp_path, warmup, local):
    def rank_main(rank):
        kinds = []
        strategy = LocalSGD(every=2, warmup=warmup)
        watch = type("Watch", (hocket.Callback,), {"batch_end": lambda self, state: kinds.append(_alone(state))})
        trainer(tmp_path, DataLoader(samples(12), 4), strategy, callbacks=[watch()], model=plain()).fit()
        return kinds

    for kinds in run_ranks(rank_main, 2):
        assert kinds == [False] * (9 - local) + [True] * local


def _alone(state):
    return not state.strategy.averages_gradients


def test_microbatches_and_weighted_losses(tmp_path):
    """A loss that is a mean over something else than samples, of which a rank's share may hold none at all."""

    def ours(outputs, targets):
        counted = (targets != 0).sum()
        return F.cross_entropy(outputs, targets, ignore_index=0, reduction="sum") / counted.clamp(min=1), counted

    def by_hand(outputs, targets):
        return F.cross_entropy(outputs, targets, ignore_index=0, reduction="sum") / (targets != 0).sum().clamp(min=1)

    def data():
        features, targets = samples(12).tensors
        targets[2:4] = 0
        return DataLoader(TensorDataset(features, targets), 4)

    def rank_main(rank):
        run = trainer(tmp_path, data(), LocalSGD(every=2), loss=ours, microbatch=1, model=plain())
        run.fit()
        return run.model_state_dict()

    expected, _ = train(plain, sgd, list(data()), by_hand, ranks=2, every=2, epochs=3)
    for weights in run_ranks(rank_main, 2):
        close(weights, expected)


def test_evaluation_sees_the_average_and_leaves_no_trace(tmp_path):
    """In the middle of five local steps: the loss is that of the average over ranks, and training goes on as without it."""
    batches = list(DataLoader(samples(20), 4))

    class Hear(hocket.Callback):
        def __init__(self):
            self.seen = []

        def eval_end(self, state):
            self.seen.append(_held(state))

    def rank_main(rank):
        runs = []
        for evaluated in ({}, {"eval_data": DataLoader(samples(9), 3), "eval_every": "3ba"}):
            hear, strategy = Hear(), LocalSGD(every=5)
            run = trainer(
                tmp_path,
                DataLoader(samples(20), 4),
                strategy,
                duration="5ba",
                model=plain(),
                callbacks=[hear],
                **evaluated,
            )
            run.fit()
            runs.append((run.model_state_dict(), dict(run.state.metrics), hear.seen))
        return runs

    middle, _ = train(plain, sgd, batches[:3], F.cross_entropy, ranks=2, every=5)
    end, _ = train(plain, sgd, batches, F.cross_entropy, ranks=2, every=5)
    model = plain()
    model.load_state_dict(end)
    inputs, targets = samples(9).tensors
    for without, with_evaluation in run_ranks(rank_main, 2):
        assert all(torch.equal(without[0][name], with_evaluation[0][name]) for name in end)
        close(with_evaluation[0], end)
        first, last = with_evaluation[2]
        close(first, middle)
        close(last, end)
        assert with_evaluation[1]["eval/loss"] == pytest.approx(F.cross_entropy(model(inputs), targets).item())


def _held(state):
    return {name: value.clone() for name, value in state.model.state_dict().items()}


def test_full_weights_in_the_middle_are_the_average_and_leave_no_trace(tmp_path):
    batches = list(DataLoader(samples(20), 4))

    def rank_main(rank):
        asked = []

        class Ask(hocket.Callback):
            def batch_end(self, state):
                if state.timestamp.batch == 3:
                    own = _held(state)
                    asked.append(state.bus.model_state(state.prepared))
                    assert all(torch.equal(value, own[name]) for name, value in _held(state).items())
                    asked.append(own)

        run = trainer(
            tmp_path, DataLoader(samples(20), 4), LocalSGD(every=5), duration="5ba", model=plain(), callbacks=[Ask()]
        )
        run.fit()
        return asked, run.model_state_dict()

    middle, _ = train(plain, sgd, batches[:3], F.cross_entropy, ranks=2, every=5)
    end, _ = train(plain, sgd, batches, F.cross_entropy, ranks=2, every=5)
    results = run_ranks(rank_main, 2)
    (first, held), (second, held_elsewhere) = results[0][0], results[1][0]
    assert not torch.equal(held["0.weight"], held_elsewhere["0.weight"])  # they do step alone
    for asked, weights in ((first, results[0][1]), (second, results[1][1])):
        close({name.removeprefix("network."): value for name, value in asked.items()}, middle)
        close(weights, end)


def test_averages_over_time_are_averaged_over_ranks(tmp_path):
    """EMA keeps each rank's own average; what is evaluated is the mean over ranks, which is the EMA of the mean weights."""
    pytest.importorskip("hocket_general")
    batches = list(DataLoader(samples(20), 4))

    def rank_main(rank):
        run = trainer(
            tmp_path,
            DataLoader(samples(20), 4),
            LocalSGD(every=3),
            duration="5ba",
            model=plain(),
            algorithms=[{"ema": {"smoothing": 0.5}}],
        )
        run.fit()
        return run.model_state_dict(evaluated=True), run.model_state_dict()

    history = [train(plain, sgd, batches[:n], F.cross_entropy, ranks=2, every=3)[0] for n in range(1, 6)]
    expected = history[0]
    for weights in history[1:]:
        expected = {name: 0.5 * expected[name] + 0.5 * value for name, value in weights.items()}
    for averaged, weights in run_ranks(rank_main, 2):
        close(averaged, expected)
        close(weights, history[-1])


def test_optimizer_state_is_the_average_and_knows_ranks_that_never_stepped(tmp_path):
    """Rank 1 of 2 has no share of the only sample."""

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.1)

    def rank_main(rank):
        run = trainer(tmp_path, DataLoader(samples(1)), LocalSGD(every=2), optimizer=adam, model=plain())
        run.fit("3ep")
        state = run.state
        whole = state.bus.optimizer_state(state.prepared, state.optimizers[0])
        return whole["state"], state.optimizers[0].state_dict()["state"]

    (first, own), (second, nothing) = run_ranks(rank_main, 2)
    assert not nothing
    close(first, own)
    close(second, own)
    assert {float(values["step"]) for values in first.values()} == {3.0}


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"every=0.*give 1 or more"):
        LocalSGD(every=0)
    with pytest.raises(ValueError, match=r"LBFGS recomputes the gradients.*strategy='ddp'"):
        LocalSGD().prepare_optimizer(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))


def test_one_rank_alone_is_a_plain_process(tmp_path):
    def rank_main(rank):
        run = trainer(tmp_path, DataLoader(samples(12), 4), LocalSGD(every=2), model=plain())
        run.fit()
        return run.model_state_dict(), run.state.strategy.averages_gradients

    expected, _ = train(plain, sgd, list(DataLoader(samples(12), 4)), F.cross_entropy, ranks=1, every=1, epochs=3)
    [(weights, averages)] = run_ranks(rank_main, 1)
    close(weights, expected, 0)
    assert averages
