"""Metrics of each library: chosen by class, saved, restored and merged as if one had seen everything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hocket.basics.plain_data import decode, encode
from hocket.state.metric_adapters import Collection, MetricAdapter, Torchmetrics, adapted

torchmetrics = pytest.importorskip("torchmetrics")


class Mean:
    """A metric of nobody's library, with names that torchmetrics uses too."""

    compute_groups = metric_state = dist_sync_on_step = "mine"

    def __init__(self) -> None:
        self.sums = torch.zeros(2)

    def update(self, outputs: Any, targets: Any) -> None:
        self.sums = self.sums + torch.tensor([(outputs.argmax(1) == targets).sum().item(), len(targets)])

    def compute(self) -> Any:
        return self.sums[0] / self.sums[1]

    def reset(self) -> None:
        self.sums = torch.zeros(2)

    def merge_state(self, others: Any) -> None:
        self.sums = self.sums + sum(other.sums for other in others)


class Stateful(Mean):
    def state_dict(self) -> Any:
        return {"sums": self.sums}

    def load_state_dict(self, state: Any) -> None:
        self.sums = state["sums"]


def accuracy() -> Any:
    return torchmetrics.classification.MulticlassAccuracy(3, average="micro")


def collection() -> Any:
    recall = torchmetrics.classification.MulticlassRecall(3, average="micro")
    return torchmetrics.MetricCollection({"a": accuracy(), "r": recall})


def auroc() -> Any:
    """Keeps lists of what it has seen."""
    return torchmetrics.classification.MulticlassAUROC(3)


def by_class() -> Any:
    """Its states are in another metric."""
    return torchmetrics.wrappers.ClasswiseWrapper(torchmetrics.classification.MulticlassAccuracy(3, average=None))


def expression() -> Any:
    return 2 * accuracy() - auroc()


KINDS = [
    (Mean, MetricAdapter),
    (Stateful, MetricAdapter),
    (accuracy, Torchmetrics),
    (auroc, Torchmetrics),
    (by_class, Torchmetrics),
    (expression, Torchmetrics),
    (collection, Collection),
]


@pytest.mark.parametrize(("make", "cls"), KINDS, ids=lambda each: each.__name__)
def test_a_metric_is_saved_restored_and_merged(make: Any, cls: Any) -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(12, 3).softmax(1), torch.randint(3, (12,))) for _ in range(4)]
    whole, halves = adapted(make()), [adapted(make()) for _ in range(2)]
    assert type(whole) is cls and whole.combines and whole.reduces_itself == (cls is not MetricAdapter)
    for number, batch in enumerate(batches):
        whole.metric.update(*batch)
        halves[number % 2].metric.update(*batch)
    restored = [adapted(make()) for _ in halves]
    for each, before in zip(restored, halves, strict=True):
        each.restore(decode(encode(copy.deepcopy(before.state()))))
    first, second = restored
    first.merge([second.metric])
    with first.alone():
        found, expected = first.metric.compute(), whole.metric.compute()
    torch.testing.assert_close(found, expected)
    first.metric.reset()
    first.metric.update(*batches[0])  # and goes on as a new one
    fresh = make()
    fresh.update(*batches[0])
    torch.testing.assert_close(first.metric.compute(), fresh.compute())


@pytest.mark.parametrize("name", ["MaxMetric", "MinMetric", "SumMetric", "MeanMetric", "CatMetric"])
def test_values_are_merged_in_the_order_of_the_run(name: str) -> None:
    """Also those whose own ``merge_state`` refuses."""
    values = [3.0, -1.0, 7.0, 0.5, 2.0]
    whole, first, second = (getattr(torchmetrics, name)() for _ in range(3))
    for number, value in enumerate(values):
        whole.update(value)
        (first if number < 3 else second).update(value)
    adapted(first).merge([second])
    assert first.compute().tolist() == whole.compute().tolist()
    assert first.update_count == 5


def test_states_without_a_reduction_cannot_be_merged() -> None:
    assert not adapted(torchmetrics.PearsonCorrCoef()).merges
    assert adapted(accuracy()).merges and adapted(collection()).merges


def test_without_merge_state_ranks_cannot_be_combined() -> None:
    class Alone(Mean):
        merge_state = property()  # type: ignore[assignment]

    assert not adapted(Alone()).combines
