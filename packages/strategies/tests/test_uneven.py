"""Ranks, microbatches and models that are not alike; against one process, in double precision."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_testkit.ranks import RankError, run_ranks

TENSOR = {"tensor-parallel": {"tensor": 2, "shard": 2, "plan": {"0": "colwise_gather_output"}}}
STRATEGIES = [("ddp", 2), ("fsdp", 2), ({"fsdp": {"replicate": 2}}, 4), pytest.param(TENSOR, 4, marks=pytest.mark.long)]


def network(*norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Linear(8, 3))


def samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(number)
    return TensorDataset(torch.randn(number, 4, generator=generator), torch.randint(3, (number,), generator=generator))


def trainer(folder, strategy="single", **options):
    # Of 13 samples in global batches of 5, rank 0 of 2 has 3, 3 and 2, rank 1 has 2, 2 and 1.
    return hocket.Trainer(
        **{
            "model": network(),
            "loss": F.cross_entropy,
            "train_data": DataLoader(samples(13), 5),
            "global_batch": 5,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
            "strategy": strategy,
            "precision": "fp64",
            "device": "cpu",
            "duration": "2ep",
            "folder": folder,
            **options,
        }
    )


def weights(folder, strategy="single", world_size=1, **options):
    """Those of rank 0, after all ranks were found to have the same."""

    def rank_main(rank=0):
        made = trainer(
            folder, strategy, **{name: value() if name == "callbacks" else value for name, value in options.items()}
        )
        made.fit()
        return made.model_state_dict()

    if world_size == 1:
        return rank_main()
    by_rank = run_ranks(rank_main, world_size)
    for each in by_rank:
        torch.testing.assert_close(each, by_rank[0], rtol=0, atol=0)
    return by_rank[0]


@pytest.mark.parametrize(("strategy", "world_size"), STRATEGIES)
def test_ranks_with_unequally_many_microbatches(tmp_path, strategy, world_size):
    found = weights(tmp_path, strategy, world_size, microbatch=1)
    torch.testing.assert_close(found, weights(tmp_path), rtol=0, atol=1e-12)


def partly_ignored(outputs, targets):
    """A mean over the samples of two classes, which some microbatches have none of."""
    targets = torch.where(targets == 2, -100, targets)
    return F.cross_entropy(outputs, targets), (targets >= 0).sum()


@pytest.mark.parametrize(
    ("strategy", "world_size"), [("single", 1), ("ddp", 2), pytest.param("fsdp", 2, marks=pytest.mark.long)]
)
def test_a_microbatch_whose_loss_is_a_mean_over_nothing(tmp_path, strategy, world_size):
    def rank_main(rank=0):
        made = trainer(tmp_path, strategy, microbatch=1, loss=partly_ignored, eval_data=DataLoader(samples(13), 1))
        return made.fit().metrics, made.model_state_dict()

    metrics, found = rank_main() if world_size == 1 else run_ranks(rank_main, world_size)[0]
    inputs, targets = samples(13).tensors
    whole = trainer(tmp_path, loss=partly_ignored)
    whole.fit()
    torch.testing.assert_close(found, whole.model_state_dict(), rtol=0, atol=1e-12)
    outputs = network().double()
    outputs.load_state_dict(found)
    mean = F.cross_entropy(outputs(inputs.double())[targets != 2], targets[targets != 2])
    assert metrics["eval/loss"] == pytest.approx(mean.item(), abs=1e-12)


class Own(nn.Module):
    """Computes its loss itself, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, inputs, labels):
        logits = self.network(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def masked_mean(outputs, labels):
    mask = labels != -100
    return (F.cross_entropy(outputs, labels, reduction="none") * mask).sum() / mask.sum(), mask.sum()


def test_ranks_with_unequally_many_labels(tmp_path):
    """Rank 0's first share has none: its mean is 0 / 0, and says nothing of what a model's own loss is a mean over."""
    inputs, labels = samples(13).tensors
    labels[:3] = -100
    pairs = TensorDataset(inputs, labels)
    named = [{"inputs": each, "labels": label} for each, label in pairs]
    total = nn.CrossEntropyLoss(reduction="sum")
    cases = {
        "own": {"model": Own, "loss": None, "data": named},
        "weighted": {"model": network, "loss": masked_mean, "data": pairs},
        "summed": {"model": network, "loss": total, "loss_reduction": "sum", "data": pairs},
    }
    if find_spec("hocket_nlp") is None:  # which finds out what a model's own loss is a mean over
        del cases["own"]

    def rank_main(rank):
        found = {}
        for name, case in cases.items():
            data = case["data"]
            options = {key: value for key, value in case.items() if key not in ("model", "data")}
            for microbatch in (None, 1):
                made = trainer(
                    tmp_path / f"{name}{microbatch}", "ddp", model=case["model"](), train_data=DataLoader(data, 5),
                    eval_data=DataLoader(data, 6), microbatch=microbatch, **options,
                )  # fmt: skip
                metrics = made.fit().metrics
                found[name, microbatch] = list(made.model_state_dict().values()), metrics["eval/loss"]
        return found

    by_rank = run_ranks(rank_main, 2)
    for (name, microbatch), (parameters, evaluated) in by_rank[0].items():
        torch.testing.assert_close(by_rank[1][name, microbatch][0], parameters, rtol=0, atol=0)
        model = network().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for x, y in [*DataLoader(pairs, 5)] * 2:
            loss = F.cross_entropy(model(x.double()), y, reduction="sum" if name == "summed" else "mean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(parameters, list(model.state_dict().values()), rtol=0, atol=1e-12)
        mean = total(model(inputs.double()), labels) / (13 if name == "summed" else 10)
        assert evaluated == pytest.approx(mean.item(), abs=1e-12), (name, microbatch)


class Parts(hocket.Callback):
    def __init__(self):
        self.seen = []

    def batch_end(self, state):
        self.seen.append({name: value.item() for name, value in state.loss_parts.items()} | {"all": state.loss.item()})


def sometimes(first_too: bool):
    """A second loss where a microbatch has a sample of class 2, and of the first batch perhaps anyway."""
    batches = []

    def loss(outputs, targets):
        batches.append(targets)
        losses = {"first": F.cross_entropy(outputs, targets)}
        if (first_too and len(batches) == 1) or (len(batches) > 3 and (targets == 2).any()):
            losses["second"] = outputs.square().mean()
        return losses

    return loss


def test_named_losses_that_not_every_microbatch_has(tmp_path):
    def rank_main(rank=0, **options):
        parts = Parts()
        trainer(tmp_path, loss=sometimes(True), microbatch=1, callbacks=[parts], **options).fit()
        return parts.seen

    for seen in (rank_main(), *run_ranks(lambda rank: rank_main(strategy="ddp"), 2)):
        assert all(each["all"] == pytest.approx(each["first"] + each["second"], abs=1e-12) for each in seen)
        assert seen[0]["second"] > 0


def test_a_named_loss_that_was_not_there_in_the_first_batch(tmp_path):
    with pytest.raises(RankError, match=r"named 'second' in batch 1 was not there in the first batch, with 'first'"):
        options = {"loss": sometimes(False), "loss_reduction": "mean"}  # which is not tried with other samples then
        run_ranks(lambda rank: trainer(tmp_path, "ddp", microbatch=1, **options).fit(), 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "number", [pytest.param(5, marks=pytest.mark.long), 1], ids=["a rank with fewer", "a rank with none"]
)
def test_metrics_of_ranks_without_a_batch(tmp_path, strategy, number):
    """Metrics that keep lists, those that keep sums, and collections of them; and every rank goes on as before."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def metrics():
        kinds = torchmetrics.classification
        both = torchmetrics.MetricCollection([kinds.MulticlassPrecision(3), kinds.MulticlassRecall(3)])
        return {"list": kinds.MulticlassAveragePrecision(3), "both": both}

    def rank_main(rank=0, **options):
        made = trainer(tmp_path, metrics=metrics(), eval_data=DataLoader(samples(number), 5), **options)
        first = made.evaluate()
        made.fit("1ba")
        return first, made.evaluate()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes without a sample
        for found in run_ranks(lambda rank: rank_main(strategy=strategy), 2):
            for values, expected in zip(found, rank_main(), strict=True):
                assert values == pytest.approx(expected, abs=1e-12, nan_ok=True)


class Freeze(hocket.Callback):
    def __init__(self, trained):
        self.trained = trained

    def epoch_start(self, state):
        if state.timestamp.epoch == 1:
            state.model[0].requires_grad_(self.trained)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("microbatch", [pytest.param(None, marks=pytest.mark.long), 1])
@pytest.mark.parametrize("options", [{}, {"compression": "powersgd"}], ids=["plain", "compressed"])
def test_what_is_trained_may_change(tmp_path, trained, microbatch, options):
    def model():
        made = network()
        made[0].requires_grad_(not trained)
        return made

    def callbacks():
        return [Freeze(trained)]

    found = weights(tmp_path, {"ddp": options}, 2, model=model(), microbatch=microbatch, callbacks=callbacks)
    expected = weights(tmp_path, model=model(), callbacks=callbacks)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not torch.equal(found["0.weight"], network()[0].weight)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_models_in_a_loop_of_ones_own(strategy):
    """Only the last microbatch of one is reduced; the other is stepped after each. Both have running statistics."""

    def loop(rank=0, strategy=strategy):
        runtime = hocket.Runtime(strategy=strategy, device="cpu")
        one, other = network(nn.BatchNorm1d(8)), network(nn.BatchNorm1d(8))
        slow, fast = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other))
        one, slow = runtime.setup(one, slow)
        other, fast = runtime.setup(other, fast)
        for number, (inputs, targets) in enumerate(runtime.setup_data(DataLoader(samples(16), 4), global_batch=8)):
            with runtime.accumulate(one, number == 1):
                runtime.backward(F.cross_entropy(one(inputs), targets))
            if number == 1:
                runtime.step(slow)
            with runtime.accumulate(other):
                runtime.backward(F.cross_entropy(other(inputs), targets))
            runtime.step(fast)
        return runtime.model_state(one), runtime.model_state(other)

    before = network(nn.BatchNorm1d(8)).state_dict()
    by_rank = run_ranks(loop, 2)
    assert all(not torch.equal(state["0.weight"], before["0.weight"]) for state in by_rank[0])
    torch.testing.assert_close(by_rank[1], by_rank[0], rtol=0, atol=0)


def test_padding_of_an_evaluation_in_a_loop_of_ones_own():
    def loop(rank):
        runtime = hocket.Runtime(strategy="fsdp", device="cpu")
        data = runtime.setup_data(DataLoader(samples(5), 2), train=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            counted = [(len(inputs), data.samples) for inputs, _ in data]
        return counted, [str(each.message) for each in caught]

    (first, silent), (second, told) = run_ranks(loop, 2)
    assert (first, second) == ([(2, 2), (1, 1)], [(2, 2), (1, 0)])
    assert not silent and "data.samples" in told[0]


def test_how_long_fsdp_waits():
    assert run_ranks(lambda rank: hocket.Runtime(strategy={"fsdp": {"timeout": 20}}, device="cpu").world_size, 2) == [
        2,
        2,
    ]


def test_ignored_labels_are_evaluated_as_in_one_batch(tmp_path) -> None:
    """Two ranks see 7 and 6 samples, of which different numbers count."""
    inputs, targets = samples(13).tensors
    targets[[1, 2, 5, 12]] = -100
    loader = DataLoader(TensorDataset(inputs, targets), 2)

    def rank_main(rank):
        return trainer(tmp_path, "ddp", train_data=None, metrics="accuracy").evaluate(loader)

    outputs = network().double()(inputs.double())
    expected = {
        "eval/loss": F.cross_entropy(outputs, targets).item(),
        "eval/accuracy": (outputs.argmax(1) == targets)[targets != -100].double().mean().item(),
    }
    assert run_ranks(rank_main, 2) == [pytest.approx(expected)] * 2
