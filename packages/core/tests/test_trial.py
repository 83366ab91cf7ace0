"""Trial losses leave no trace: whatever a loss changes in its task is as if it had been computed once."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.loop.trial import without_trace

SAMPLES = 43
DATA = TensorDataset(torch.randn(SAMPLES, 5), torch.arange(SAMPLES) % 2)


class Meter:
    """Collects in ways that a shallow copy of its attributes does not restore."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.samples, self.batches, self.classes = torch.zeros(()), [], Counter()
        self.counts, self.recent, self.seen = numpy.zeros(2, numpy.int64), deque(maxlen=3), set()

    def update(self, targets: Tensor) -> None:
        self.samples += len(targets)
        self.batches.append(targets.tolist())
        self.classes.update(targets.tolist())
        self.counts += numpy.bincount(targets.numpy(), minlength=2)
        self.recent.append(len(targets))
        self.seen.add(len(targets))

    def content(self) -> list[Any]:
        return [
            int(self.samples), len(self.batches), dict(self.classes), self.counts.tolist(), list(self.recent), self.seen
        ]  # fmt: skip


class Collecting(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.meter = nn.Linear(5, 2), Meter()
        self.by_name = {"samples": torch.zeros(())}
        self.matrix = torch.zeros(2, 2)
        self.register_buffer("total", torch.zeros(()))
        self.normalized = nn.BatchNorm1d(2)

    def forward(self, batch: Any) -> Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        targets = batch[1]
        self.meter.update(targets)
        self.by_name["samples"] += len(targets)
        self.matrix.view(-1).index_add_(0, targets, torch.ones(len(targets)))
        self.total += len(targets)
        self.last = targets
        self.normalized(outputs)
        return nn.functional.cross_entropy(outputs, targets)

    def content(self) -> list[Any]:
        states = [self.matrix.tolist(), int(self.by_name["samples"]), int(self.total), self.last.tolist()]
        return [*self.meter.content(), *states, self.normalized.running_mean.tolist()]


@pytest.mark.parametrize("microbatch", [None, 5])
def test_a_loss_changes_its_task_once_a_batch(microbatch: int | None) -> None:
    """Of 43 samples in batches of 8: the last ones are smaller, in training and in the evaluation, so losses are tried."""
    torch.manual_seed(0)
    task = Collecting()
    plain = Collecting()
    plain.load_state_dict(task.state_dict())
    trainer = hocket.Trainer(
        task, DataLoader(DATA, batch_size=8), optimizer="sgd(lr=0.0)", duration="1ep", microbatch=microbatch,
        eval_data={"test": DataLoader(DATA, batch_size=8)}, device="cpu",
    )  # fmt: skip
    trainer.fit()
    sizes = [each for size in (8, 8, 8, 8, 8, 3) for each in ([size] if microbatch is None else [5, size - 5])]
    if microbatch is not None:
        sizes[-2:] = [3]
    start = 0
    for size in sizes:
        batch = [each[start : start + size] for each in DATA.tensors]
        plain.loss(plain(batch), batch)
        start += size
    plain.eval()
    for start in range(0, SAMPLES, 8):
        batch = [each[start : start + 8] for each in DATA.tensors]
        plain.loss(plain(batch), batch)
    assert task.content()[:-1] == plain.content()[:-1]
    assert task.content()[-1] == pytest.approx(plain.content()[-1])


def test_torchmetrics_in_a_loss_are_those_of_the_whole_set() -> None:
    metrics = pytest.importorskip("torchmetrics")

    class Measured(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)
            self.metrics_ = nn.ModuleDict(
                {
                    "mean": metrics.MeanMetric(), "sum": metrics.SumMetric(), "mse": metrics.MeanSquaredError(),
                    "auroc": metrics.classification.BinaryAUROC(),
                    "auroc20": metrics.classification.BinaryAUROC(thresholds=20),
                }
            )  # fmt: skip

        def forward(self, batch: Any) -> Tensor:
            return self.layer(batch[0])

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            if not self.training:
                found = outputs.softmax(1)[:, 1]
                for name, metric in self.metrics_.items():
                    metric.update(*[found, batch[1].float() if name == "mse" else batch[1]][: metric_inputs[name]])
                self.log(dict(self.metrics_.items()))
            return nn.functional.cross_entropy(outputs, batch[1])

    metric_inputs = {"mean": 1, "sum": 1, "mse": 2, "auroc": 2, "auroc20": 2}
    task = Measured()
    trainer = hocket.Trainer(
        task, DataLoader(DATA, batch_size=16), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        eval_data={"test": DataLoader(DATA, batch_size=10)},
    )  # fmt: skip
    result = trainer.fit()
    with torch.no_grad():
        found = task.layer(DATA.tensors[0]).softmax(1)[:, 1]
    auroc = metrics.functional.classification.binary_auroc
    expected = {
        "mean": found.mean(), "sum": found.sum(), "mse": (found - DATA.tensors[1]).square().mean(),
        "auroc": auroc(found, DATA.tensors[1]), "auroc20": auroc(found, DATA.tensors[1], thresholds=20),
    }  # fmt: skip
    assert {name: result.metrics[f"test/{name}"] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-5
    )


@pytest.mark.parametrize("watch", [True, False])
def test_an_exception_leaves_no_trace_either(watch: bool) -> None:
    task = Collecting()
    batch = [each[:8] for each in DATA.tensors]
    task.loss(task(batch), batch)
    before = task.content()
    with pytest.raises(ZeroDivisionError), without_trace(task, watch):
        task.loss(task(batch), batch)
        task.added = 1 / 0
    assert task.content() == before
    with without_trace(task, watch):
        task.added = 1
        del task.last
        task.eval()
    assert not hasattr(task, "added")
    assert task.training and task.layer.training
    assert task.content() == before
