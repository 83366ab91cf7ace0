"""LabelSmoothing on its two events, against torch's own label smoothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hocket.hookspecs import Event
from hocket_general import LabelSmoothing

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.3, 0.1, 0.0], [1.0, 1.0, 4.0]])


def _run(algorithm, batch, outputs=LOGITS, loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1])):
    """The two events around a loss, as the loop has them; returns the loss and the state afterwards."""
    state = SimpleNamespace(task=None, batch=batch, outputs=outputs)
    algorithm.apply(Event.BEFORE_LOSS, state)
    value = loss(state.outputs, state.batch)
    algorithm.apply(Event.AFTER_LOSS, state)
    return value, state


def test_the_loss_is_torchs_with_label_smoothing_and_the_targets_come_back():
    inputs, targets = torch.zeros(3, 1), torch.tensor([0, 1, 2])
    value, state = _run(LabelSmoothing(0.2), (inputs, targets))
    torch.testing.assert_close(value, F.cross_entropy(LOGITS, targets, label_smoothing=0.2))
    assert state.batch[0] is inputs and state.batch[1] is targets
    assert targets.tolist() == [0, 1, 2]


def test_the_batch_of_the_user_is_not_changed():
    targets = torch.tensor([0, 1, 2])
    batch = [torch.zeros(3, 1), targets]
    _run(LabelSmoothing(), batch)
    assert batch[1] is targets


@pytest.mark.parametrize("ignore_index", [-100, 255])
def test_a_mean_over_positions_that_count(ignore_index):
    targets = torch.tensor([0, ignore_index, 2])
    value, _ = _run(LabelSmoothing(0.1, ignore_index=ignore_index), (None, targets))
    expected = F.cross_entropy(LOGITS, targets, ignore_index=ignore_index, label_smoothing=0.1)
    torch.testing.assert_close(value, expected)


def test_probability_targets_and_named_targets():
    dense = torch.softmax(LOGITS.flip(0), 1)
    value, state = _run(
        LabelSmoothing(0.3, target_key="label"),
        {"x": 1, "label": dense},
        loss=lambda o, b: F.cross_entropy(o, b["label"]),
    )
    torch.testing.assert_close(value, F.cross_entropy(LOGITS, dense * 0.7 + 0.1))
    assert state.batch["label"] is dense


def test_outputs_without_logits_are_an_error_that_says_what_to_do():
    with pytest.raises(TypeError, match=r"found dict and Tensor\. .*smooth_labels in the loss of a hocket\.Task"):
        _run(LabelSmoothing(), (None, torch.tensor([0])), outputs={"loss": torch.tensor(0.0)})


@pytest.mark.parametrize("smoothing", [-0.1, 1.1])
def test_smoothing_is_a_share(smoothing):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        LabelSmoothing(smoothing)
