"""Metrics by name: what they refuse, and that no batch waits for the device to find out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hocket.state.simple_metrics import Accuracy


class Elsewhere(Tensor):
    """A tensor that says that it is on a device."""

    is_cpu = False  # type: ignore[assignment]


BINARY = torch.tensor([0.2, 3.0, -1.0]), torch.tensor([0.0, 1.0, 1.0])
SOFT = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.9, 0.1], [0.8, 0.2]])
SEVERAL = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
NUMBERS = torch.tensor([0.2, 3.0]), torch.tensor([5.0, 1.0])
NAN = torch.tensor([0.2, 3.0]), torch.tensor([float("nan"), 1.0])
CLASSES = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])


@pytest.mark.parametrize("batch", [BINARY, SOFT, SEVERAL, NUMBERS, CLASSES])
@pytest.mark.parametrize("loss", [None, F.binary_cross_entropy_with_logits])
def test_an_update_reads_no_value_of_a_device(batch: Any, loss: Any) -> None:
    metric = Accuracy()
    metric.follow(loss)
    metric.update(*(each.to("meta") for each in batch))  # whose values cannot be read


@pytest.mark.parametrize("batch, value", [(BINARY, 1 / 3), (SOFT, 0.5), (CLASSES, 0.5)])
def test_values_are_those_of_the_cpu(batch: Any, value: float) -> None:
    for of in (Tensor, Elsewhere):
        metric = Accuracy()
        metric.follow(F.binary_cross_entropy_with_logits if batch is BINARY else F.cross_entropy)
        metric.update(*(each.as_subclass(of) for each in batch))
        assert metric.compute() == pytest.approx(value)


@pytest.mark.parametrize(
    "batch, text", [(NUMBERS, "which are not labels"), (NAN, "which are not labels"), (SEVERAL, "do not add up to 1")]
)
def test_what_is_refused_at_once_on_the_cpu_is_refused_later_on_a_device(batch: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Accuracy().update(*batch)
    here, there = Accuracy(), Accuracy()
    there.update(*(each.as_subclass(Elsewhere) for each in batch))
    with pytest.raises(ValueError, match=text):
        there.compute()
    here.merge_state([there])
    with pytest.raises(ValueError, match=text):
        here.compute()
