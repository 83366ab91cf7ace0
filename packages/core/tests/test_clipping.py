"""Gradient clipping against plain recomputations, unit by unit."""

import math

import pytest
import torch
from torch import nn

from hocket.basics.dtensors import non_finite
from hocket.optim.clipping import clip_gradients

SHAPES = [(), (5,), (4, 3), (2, 3, 5), (3, 2, 3, 3)]


def parameters(dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in SHAPES:
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameter.grad = (scale * torch.randn(shape, generator=generator)).to(dtype)
        made.append(parameter)
    made.append(nn.Parameter(torch.ones(2, dtype=dtype)))  # without a gradient
    return made


def gradients(params):
    return [p.grad.clone() for p in params if p.grad is not None]


@pytest.mark.parametrize("threshold", [0.5, 100.0, math.inf])
def test_norm(threshold):
    params = parameters()
    before = gradients(params)
    expected = math.sqrt(sum(float((g.double() ** 2).sum()) for g in before))
    norm = clip_gradients(iter(params), "norm", threshold)
    assert norm.shape == () and float(norm) == pytest.approx(expected, rel=1e-6)
    factor = min(1.0, threshold / expected)
    for gradient, old in zip(gradients(params), before, strict=True):
        torch.testing.assert_close(gradient, old * factor, rtol=1e-5, atol=1e-7)


def test_norm_without_gradients_is_zero():
    assert float(clip_gradients([nn.Parameter(torch.ones(2))], "norm", 1.0)) == 0.0


def test_value():
    params = parameters()
    before = gradients(params)
    assert clip_gradients(params, "value", 0.3) is None
    assert any((g.abs() > 0.3).any() for g in before)
    for gradient, old in zip(gradients(params), before, strict=True):
        assert torch.equal(gradient, old.clamp(-0.3, 0.3))


def agc_by_hand(weight, gradient, threshold, floor):
    """Brock et al. 2021, eq. 3, one unit at a time in Python floats."""
    weight, gradient = weight.double(), gradient.double()
    units = range(weight.shape[0]) if weight.ndim > 1 else [...]
    result = gradient.clone()
    for unit in units:
        w = max(math.sqrt(float((weight[unit] ** 2).sum())), floor)
        g = math.sqrt(float((gradient[unit] ** 2).sum()))
        if g / w > threshold:
            result[unit] = threshold * w / g * gradient[unit]
    return result


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.2, 50.0])
@pytest.mark.parametrize("threshold", [0.01, 0.16])
@pytest.mark.parametrize("floor", [1e-3, 3.0])
def test_adaptive(scale, threshold, floor):
    params = parameters(scale=scale)
    expected = [agc_by_hand(p.detach(), p.grad, threshold, floor) for p in params if p.grad is not None]
    weights = [p.detach().clone() for p in params]
    assert clip_gradients(params, "adaptive", threshold, floor=floor) is None
    for gradient, target in zip(gradients(params), expected, strict=True):
        torch.testing.assert_close(gradient.double(), target, rtol=1e-5, atol=1e-9)
    assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))


def test_adaptive_lets_zero_initialised_units_learn():
    weight = nn.Parameter(torch.zeros(3, 4))
    weight.grad = torch.ones(3, 4)
    clip_gradients(weight, "adaptive", 0.1)
    torch.testing.assert_close(weight.grad.norm(dim=1), torch.full((3,), 0.1 * 1e-3))


def test_adaptive_leaves_tiny_gradients_alone():
    weight = nn.Parameter(torch.full((2, 2), 1e-6))
    weight.grad = torch.full((2, 2), 1e-9)
    before = weight.grad.clone()
    clip_gradients([weight], "adaptive", 1e-4)
    assert torch.equal(weight.grad, before)


def test_adaptive_in_half_precision_takes_norms_in_single():
    """The squares of these numbers overflow, or vanish, in float16."""
    weight = nn.Parameter(torch.full((1, 100), 1e-4, dtype=torch.float16))
    weight.grad = torch.full((1, 100), 1000.0, dtype=torch.float16)
    clip_gradients([weight], "adaptive", 1.0, floor=1e-5)
    assert weight.grad.dtype == torch.float16
    torch.testing.assert_close(weight.grad, weight.detach(), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("kind", ["norm", "adaptive"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_stays_visible(kind, bad):
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.tensor([[bad, 1.0], [1.0, 1.0]])
    clip_gradients([weight], kind, 0.5)
    assert not weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "threshold", "floor"),
    [
        ("norm", 0.0, 1e-3),
        ("norm", -1.0, 1e-3),
        ("value", math.nan, 1e-3),
        ("adaptive", 0.1, 0.0),
        ("adaptive", 0.1, math.inf),
        ("inf", 1.0, 1e-3),
    ],
)
def test_refuses(kind, threshold, floor):
    params = parameters()
    before = gradients(params)
    with pytest.raises(ValueError):
        clip_gradients(params, kind, threshold, floor=floor)
    assert all(torch.equal(a, b) for a, b in zip(gradients(params), before, strict=True))


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_never_waits_for_the_device(kind):
    """Meta tensors have no values: whatever asks for one raises."""
    weight = nn.Parameter(torch.ones(3, 2, device="meta"))
    weight.grad = torch.ones(3, 2, device="meta")
    with pytest.raises(RuntimeError):
        weight.grad.sum().item()
    norm = clip_gradients([weight], kind, 0.1)
    assert (norm is not None) == (kind == "norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["dense", "expanded", "sparse", "mixed"])
def test_what_is_not_finite_is_found_and_nothing_is_changed(dtype, bad, kind):
    value = torch.tensor(3.0 if bad is None else bad, dtype=dtype)
    tensor = torch.eye(3, dtype=dtype) if kind != "expanded" else value.expand(4)
    if kind != "expanded":
        tensor[1, 1] = value
    given = [tensor.to_sparse() if kind == "sparse" else tensor, torch.full((2,), 1e30, dtype=torch.float64)]
    given = given if kind == "mixed" else given[:1]
    before = tensor.clone()
    assert bool(non_finite(given)) is (bad is not None)
    assert torch.equal(tensor.isnan(), before.isnan()) and torch.equal(tensor.nan_to_num(), before.nan_to_num())
