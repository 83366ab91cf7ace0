"""Training on several ranks equals a plain PyTorch loop over the same global batches, to rounding in double precision."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hocket
from hocket_testkit.ranks import run_ranks


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(number)
    return TensorDataset(torch.randn(number, 4, generator=generator), torch.randint(3, (number,), generator=generator))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def plain(batches, loss=F.cross_entropy, epochs=1, make=network):
    """The reference: weights after training, and the loss of every batch."""
    model = make().double()
    optimizer = sgd(model.parameters())
    losses = []
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            value = loss(model(inputs.double()), targets)
            value.backward()
            optimizer.step()
            losses.append(value.item())
    return model, losses


class Losses(hocket.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def batch_end(self, state):
        self.losses.append(state.loss.item())


def trained(make_data, world_size, folder, *, loss=F.cross_entropy, make=network, **options):
    """By rank: weights, losses of the batches, and the result of the fit. Global batches have 4 samples unless said."""

    def rank_main(rank):
        torch.manual_seed(rank)
        losses = Losses()
        trainer = hocket.Trainer(
            **{
                "model": make(),
                "loss": loss,
                "train_data": make_data(),
                "global_batch": 4,
                "optimizer": sgd,
                "strategy": "ddp",
                "precision": "fp64",
                "device": "cpu",
                "duration": "1ep",
                "folder": folder,
                **options,
                "callbacks": [losses, *options.get("callbacks", ())],
            }
        )
        result = trainer.fit()
        assert list(trainer.model_state_dict()) == list(make().state_dict())
        return trainer.model_state_dict(), losses.losses, result.timestamp, result.metrics

    return run_ranks(rank_main, world_size)


def equal_to(expected, by_rank, tolerance=1e-12):
    """Every rank holds the same bits, and they are the expected weights and losses to rounding."""
    model, losses = expected
    for weights, seen, *_ in by_rank:
        torch.testing.assert_close(weights, by_rank[0][0], rtol=0, atol=0)
        torch.testing.assert_close(weights, model.state_dict(), rtol=tolerance, atol=tolerance)
        assert seen == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("microbatch", [None, 1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "number, batch_size",
    [
        pytest.param(8, 4, marks=pytest.mark.long),  # even
        (13, 4),  # the last batch has one sample: on two ranks one has none, on three two have none
        pytest.param(10, 5, marks=pytest.mark.long),  # five samples on two ranks: three and two
        (7, 7),
        pytest.param(4, 3, marks=pytest.mark.long),
    ],
)
def test_uneven_batches_and_microbatches(tmp_path, world_size, microbatch, number, batch_size):
    def data():
        return DataLoader(samples(number), batch_size)

    by_rank = trained(data, world_size, tmp_path, microbatch=microbatch, duration="2ep", global_batch=batch_size)
    equal_to(plain(data(), epochs=2), by_rank)
    for _, _, timestamp, _ in by_rank:
        assert (timestamp.epoch, timestamp.sample) == (2, 2 * number)
        assert timestamp.batch == 2 * -(-number // batch_size)


def test_losses_that_are_means_over_something_else(tmp_path):
    """Targets of 0 do not count, as padding tokens do not; one rank's share may hold no target that counts."""

    def ours(outputs, targets):
        counted = (targets != 0).sum()
        return F.cross_entropy(outputs, targets, ignore_index=0, reduction="sum") / counted.clamp(min=1), counted

    def data():
        features, targets = samples(12).tensors
        targets[2:4] = 0
        return DataLoader(TensorDataset(features, targets.clamp(max=2)), 4)

    by_rank = trained(data, 2, tmp_path, loss=ours, microbatch=1)
    equal_to(plain(data(), loss=lambda o, t: F.cross_entropy(o, t, ignore_index=0)), by_rank)


def test_a_shuffling_loader_gives_the_batches_of_one_process(tmp_path):
    def data():
        return DataLoader(samples(11), 4, shuffle=True, generator=torch.Generator().manual_seed(5))

    equal_to(plain(data(), epochs=3), trained(data, 2, tmp_path, duration="3ep"))


def test_a_seed_gives_the_same_batches_on_any_number_of_ranks(tmp_path):
    def data():
        return DataLoader(samples(11), 4, shuffle=True)

    weights = [trained(data, n, tmp_path, duration="3ep", seed=17)[0][0] for n in (1, 2, 3)]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-12, atol=1e-12)


def test_an_optimizer_that_computes_the_gradients_again(tmp_path):
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)

    def data():
        return DataLoader(samples(9), 4)

    model = network().double()
    optimizer = lbfgs(model.parameters())
    for inputs, targets in data():

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs.double()), targets)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    for weights, *_ in trained(data, 2, tmp_path, optimizer=lbfgs, microbatch=1):
        torch.testing.assert_close(weights, model.state_dict(), rtol=1e-9, atol=1e-9)


def test_a_request_of_one_rank_is_heard_by_all(tmp_path):
    class Stop(hocket.Callback):
        def batch_end(self, state):
            if state.strategy.rank == 1 and state.timestamp.batch == 2:
                state.request(hocket.Decision.STOP, "rank 1 has had enough")

    def data():
        return DataLoader(samples(16), 4)

    assert [timestamp.batch for _, _, timestamp, _ in trained(data, 2, tmp_path, callbacks=[Stop()])] == [2, 2]


def test_worker_processes(tmp_path):
    def data():
        return DataLoader(samples(9), 4, num_workers=1, persistent_workers=True)

    equal_to(plain(DataLoader(samples(9), 4), epochs=2), trained(data, 2, tmp_path, duration="2ep"))


def test_a_batch_size_is_each_ranks_own(tmp_path):
    def data():
        return DataLoader(samples(13), 2)

    expected = plain(DataLoader(samples(13), 6), epochs=2)
    equal_to(expected, trained(data, 3, tmp_path, duration="2ep", global_batch=None))


@pytest.mark.filterwarnings("ignore:Every rank reads all")
def test_iterable_data(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples(9))

    def data():
        return DataLoader(Stream(), 4)

    equal_to(plain(DataLoader(samples(9), 4)), trained(data, 2, tmp_path))
    # Without a global batch the first two batches are one, and the last is one on its own.
    features, targets = samples(9).tensors
    expected = plain([(features[:8], targets[:8]), (features[8:], targets[8:])])
    equal_to(expected, trained(data, 2, tmp_path, global_batch=None))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
@pytest.mark.parametrize("uneven", ["pad", "end"])
def test_data_that_is_divided_already(tmp_path, strategy, uneven):
    """Rank 0 has four batches of two, rank 1 has three of one: the global batches are what both have at the same place."""
    features, targets = samples(10).tensors
    shares = [[[0, 1], [3, 4], [6, 7], [8, 9]], [[2], [5], [6]]]

    def data():
        rank = int(os.environ["RANK"])
        return [(features[share], targets[share]) for share in shares[rank]]

    global_batches = [[0, 1, 2], [3, 4, 5], [6, 7, 6], [8, 9]][: 4 if uneven == "pad" else 3]
    expected = plain([(features[batch], targets[batch]) for batch in global_batches], epochs=2)
    options = {"strategy": {strategy: {"split_data": False, "uneven": uneven}}, "global_batch": None, "duration": "2ep"}
    by_rank = trained(data, 2, tmp_path, **options)
    equal_to(expected, by_rank)
    assert {timestamp.batch for _, _, timestamp, _ in by_rank} == {2 * len(global_batches)}


class Seen:
    """A metric that keeps what it was shown."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, outputs, targets):
        self.values += targets.tolist()

    def merge_state(self, others):
        for other in others:
            self.values += other.values

    def compute(self):
        return {"number": float(len(self.values)), "sum": sum(self.values)}

    def reset(self):
        self.values.clear()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("number, batch_size", [pytest.param(5, 5, marks=pytest.mark.long), (9, 4), (1, 4), (3, 1)])
def test_evaluation_counts_every_sample_once(tmp_path, world_size, number, batch_size):
    features = torch.randn(number, 4, generator=torch.Generator().manual_seed(number))
    targets = torch.arange(1.0, number + 1)  # their sum is known

    def evaluated(rank):
        torch.manual_seed(0)
        trainer = hocket.Trainer(
            model=nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
            loss=F.mse_loss,
            metrics={"seen": Seen()},
            strategy="ddp",
            precision="fp64",
            device="cpu",
            folder=tmp_path,
        )
        return trainer.evaluate({"test": DataLoader(TensorDataset(features, targets), batch_size, shuffle=True)})

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    loss = F.mse_loss(model(features.double()), targets.double()).item()
    for values in run_ranks(evaluated, world_size):
        assert values == {
            "test/loss": pytest.approx(loss, rel=1e-12),
            "test/seen/number": number,
            "test/seen/sum": number * (number + 1) / 2,
        }


def test_prediction_is_each_ranks_share(tmp_path):
    def predicted(rank):
        trainer = hocket.Trainer(model=nn.Identity(), strategy="ddp", device="cpu", folder=tmp_path)
        return [outputs.flatten().tolist() for outputs in trainer.predict(DataLoader(torch.arange(5.0), 4))]

    assert run_ranks(predicted, 2) == [[[0, 1, 2, 3]], [[4]]]


def test_ranks_with_batch_norm_keep_one_model(tmp_path):
    def normed():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def data():
        return DataLoader(samples(16), 4)

    by_rank = trained(data, 2, tmp_path, global_batch=None, make=normed, eval_data=DataLoader(samples(6), 3))
    for weights, losses, _, metrics in by_rank:
        torch.testing.assert_close(weights, by_rank[0][0], rtol=0, atol=0)
        assert (losses, metrics) == (by_rank[0][1], by_rank[0][3])
    # Statistics are those of rank 0's batches.
    inputs, _ = next(iter(data()))
    expected = normed().double()[0](inputs.double()).mean(0) * 0.1
    one_batch = trained(data, 2, tmp_path, global_batch=None, make=normed, duration="1ba")[0][0]
    torch.testing.assert_close(one_batch["1.running_mean"], expected)


def test_auto_chooses_ddp_where_there_are_several_processes(tmp_path):
    def rank_main(rank):
        trainer = hocket.Trainer(model=nn.Linear(1, 1), device="cpu", folder=tmp_path)
        return type(trainer.state.strategy).__name__

    assert run_ranks(rank_main, 2) == ["DDP", "DDP"]


SCRIPT = """
    import os
    import sys
    import torch, hocket
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    features = torch.arange(10.0).view(5, 2) / 10
    trainer = hocket.Trainer(
        model=torch.nn.Linear(2, 1),
        loss=torch.nn.functional.mse_loss,
        train_data=DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), 5),
        global_batch=5,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        duration="3ba",
        device="cpu",
        run_name="run",
        folder=sys.argv[1],
    )
    trainer.fit()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os._exit(1)
    torch.save(trainer.model_state_dict(), sys.argv[1] + "/" + os.environ["RANK"])
"""


@pytest.mark.long
def test_torchrun_and_a_restart(tmp_path):
    """The way in which users start it, once: everything else here joins ranks that were forked.

    Rank 1 dies in the first attempt; in the second one, ranks must not look for the processes of the first.
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, *launch, "--monitor-interval", "0.1", str(script), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features = torch.arange(10.0).view(5, 2) / 10
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(features), features.sum(1, keepdim=True)).backward()
        optimizer.step()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / str(rank)), model.state_dict())
