"""GradientClipping as an action; the arithmetic of the kinds is tested where it lives, in core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hocket_general import GradientClipping


def clipped(kind, threshold, gradient, weight):
    """The gradient of one linear layer after the action, and what the action returned."""
    task = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        task.weight.copy_(torch.tensor(weight))
    task.weight.grad = torch.tensor(gradient)
    action = GradientClipping(kind, threshold).clip_gradients(SimpleNamespace(trained_parameters=task.parameters))
    next(action)
    with pytest.raises(StopIteration) as end:
        action.send(True)  # what the default says if it clips nothing
    return task.weight.grad.tolist(), end.value.value


def test_by_norm_returns_the_norm_before():
    gradient, norm = clipped("norm", 1.0, [[3.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert norm.item() == 5.0
    assert gradient == [pytest.approx([0.6, 0.0], abs=1e-5), pytest.approx([0.0, 0.8], abs=1e-5)]


def test_by_value():
    gradient, returned = clipped("value", 0.5, [[3.0, 0.25], [-4.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert gradient == [[0.5, 0.25], [-0.5, 0.0]]
    assert returned is True


def test_adaptive_bounds_each_unit_by_its_weights_and_lets_zero_weights_move():
    weight = [[3.0, 4.0], [0.0, 0.0]]
    gradient, returned = clipped("adaptive", 0.1, [[30.0, 40.0], [3.0, 4.0]], weight)
    # First unit: norm 50 down to 0.1 * 5. Second: down to 0.1 * 1e-3, the floor of the paper, and not to zero.
    assert gradient[0] == pytest.approx([0.3, 0.4], rel=1e-4)
    assert gradient[1] == pytest.approx([0.6e-4, 0.8e-4], rel=1e-3)
    assert returned is True


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan")])
def test_a_threshold_is_positive(threshold):
    with pytest.raises(ValueError, match="positive"):
        GradientClipping("norm", threshold)


def test_an_unknown_kind_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'norm', 'value', 'adaptive'"):
        GradientClipping("agc", 1.0)  # type: ignore[arg-type]
