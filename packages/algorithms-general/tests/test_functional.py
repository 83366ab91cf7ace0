"""The plain functions against formulas, papers' definitions, and torch's own implementations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from hocket_general.functional import (
    clip_gradients,
    ema_smoothing,
    ema_update,
    sam_perturbation,
    smooth_labels,
    soft_cross_entropy,
)

# --- label smoothing


def test_smooth_labels_of_four_classes():
    smooth = smooth_labels(torch.zeros(2, 4), torch.tensor([0, 3]), smoothing=0.1)
    expected = torch.tensor([[0.925, 0.025, 0.025, 0.025], [0.025, 0.025, 0.025, 0.925]])
    torch.testing.assert_close(smooth, expected)
    assert smooth.dtype == torch.float32


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 2, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.37, 1.0])
def test_cross_entropy_of_smooth_labels_is_torchs_label_smoothing(shape, smoothing):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape[0], 7, *shape[1:], generator=generator, requires_grad=True)
    targets = torch.randint(7, shape, generator=generator)
    loss = F.cross_entropy(logits, smooth_labels(logits, targets, smoothing))
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


def test_dense_targets_are_smoothed_as_their_indices_are():
    logits = torch.zeros(3, 5, 2)
    targets = torch.tensor([[0, 1], [4, 2], [3, 3]])
    dense = F.one_hot(targets, 5).movedim(-1, 1)
    for given_ in (dense, dense.float(), dense.double()):
        torch.testing.assert_close(smooth_labels(logits, given_, 0.2), smooth_labels(logits, targets, 0.2))
    mixed = torch.full((1, 2), 0.5)
    torch.testing.assert_close(smooth_labels(torch.zeros(1, 2), mixed, 0.3), mixed)


def test_smooth_labels_leaves_its_arguments_alone():
    targets, dense = torch.tensor([0, -100]), torch.eye(2)
    smooth_labels(torch.zeros(2, 2), targets)
    smooth_labels(torch.zeros(2, 2), dense)
    assert targets.tolist() == [0, -100]
    assert torch.equal(dense, torch.eye(2))


@pytest.mark.parametrize("ignore_index", [-100, -1, 255])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_positions_neither_count_nor_weigh(ignore_index, smoothing):
    logits = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[0, ignore_index], [2, 1], [ignore_index, ignore_index], [1, 0]])
    smooth = smooth_labels(logits, targets, smoothing, ignore_index=ignore_index)
    assert torch.equal(smooth.sum(1).round(decimals=5), (targets != ignore_index).float())
    expected = F.cross_entropy(logits, targets, ignore_index=ignore_index, label_smoothing=smoothing)
    torch.testing.assert_close(soft_cross_entropy(logits, smooth), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_smooth_labels_are_at_least_float32(dtype):
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    smooth = smooth_labels(logits, torch.tensor([1, 2]))
    assert smooth.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = F.cross_entropy(logits.double(), torch.tensor([1, 2]), label_smoothing=0.1)
    torch.testing.assert_close(F.cross_entropy(logits, smooth).double(), expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("index_dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_index_targets_may_be_any_integers(index_dtype):
    smooth = smooth_labels(torch.zeros(2, 3), torch.tensor([0, 2], dtype=index_dtype), 0.0)
    assert smooth.tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("wrong", [-1, 3, 255])
def test_an_index_that_is_no_class_is_an_error(wrong):
    with pytest.raises(ValueError, match=r"\[0, 3\).*ignore_index=-100"):
        smooth_labels(torch.zeros(2, 3), torch.tensor([0, wrong]))


@pytest.mark.parametrize(
    ("logits", "targets", "smoothing", "error", "words"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 1]), 1.5, ValueError, r"\[0, 1\]"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), float("nan"), ValueError, r"\[0, 1\]"),
        (torch.zeros(3), torch.tensor(0), 0.1, TypeError, "dimension 1"),
        (torch.zeros(2, 3, dtype=torch.long), torch.tensor([0, 1]), 0.1, TypeError, "floating-point"),
        (torch.zeros(2, 3), torch.tensor([0, 1, 1]), 0.1, ValueError, r"\(3,\).*\(2, 3\).*\(2,\)"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), 0.1, TypeError, r"targets\.long\(\)"),
    ],
)
def test_smooth_labels_says_what_is_wrong(logits, targets, smoothing, error, words):
    with pytest.raises(error, match=words):
        smooth_labels(logits, targets, smoothing)


def test_no_samples_give_no_rows():
    assert smooth_labels(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape == (0, 3)


def test_soft_cross_entropy_by_hand():
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    # log(e^2 + 2) = 2.239535; the loss of class 0 is that minus 2.
    assert soft_cross_entropy(logits, torch.tensor([0])).item() == pytest.approx(0.239535, abs=1e-5)
    assert soft_cross_entropy(logits, torch.tensor([[0.8, 0.1, 0.1]])).item() == pytest.approx(0.639535, abs=1e-5)
    # Half the mass: the mean is over mass, so it is the loss of a whole target.
    assert soft_cross_entropy(logits, torch.tensor([[0.5, 0.0, 0.0]])).item() == pytest.approx(0.239535, abs=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_soft_cross_entropy_is_torchs_where_torch_has_one(reduction):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 3, 2, generator=generator)
    indices = torch.tensor([[0, 1], [2, -100], [1, 1], [0, 2]])
    torch.testing.assert_close(
        soft_cross_entropy(logits, indices, reduction), F.cross_entropy(logits, indices, reduction=reduction)
    )
    dense = torch.softmax(torch.randn(4, 3, 2, generator=generator), 1)
    expected = F.cross_entropy(logits, dense, reduction=reduction)
    torch.testing.assert_close(soft_cross_entropy(logits, dense, reduction), expected)


def test_soft_cross_entropy_knows_three_reductions():
    with pytest.raises(ValueError, match="'mean', 'sum' or 'none'"):
        soft_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), "average")  # type: ignore[arg-type]


# --- exponential moving average


def test_ema_smoothing_of_the_default_half_life():
    assert ema_smoothing(1000) == pytest.approx(0.99930709, abs=1e-8)


@given(half_life=st.floats(1, 1e6), updates=st.integers(1, 200))
def test_after_half_lives_half_is_left(half_life, updates):
    """Whatever the interval, the updates that make up one half-life halve what was there before."""
    assert ema_smoothing(half_life, half_life / updates) ** updates == pytest.approx(0.5)


@pytest.mark.parametrize(("half_life", "interval"), [(0, 1), (-1, 1), (float("nan"), 1), (10, -1)])
def test_ema_smoothing_refuses_what_makes_no_average(half_life, interval):
    with pytest.raises(ValueError, match="positive half-life"):
        ema_smoothing(half_life, interval)


@settings(max_examples=30)
@given(smoothing=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_ema_update_is_the_formula(smoothing, seed):
    generator = torch.Generator().manual_seed(seed)
    averages = [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator, dtype=torch.float64)]
    values = [torch.randn_like(average, requires_grad=True) for average in averages]
    pairs = [(a.double(), v.detach().double()) for a, v in zip(averages, values, strict=True)]
    expected = [smoothing * average + (1 - smoothing) * value for average, value in pairs]
    ema_update(averages, values, smoothing)
    for average, value in zip(averages, expected, strict=True):
        torch.testing.assert_close(average.double(), value, rtol=1e-5, atol=1e-6)
        assert not average.requires_grad


def test_ema_update_follows_torchs_averaged_model():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    reference = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    reference.update_parameters(model)  # the first update copies
    averages = [p.detach().clone() for p in model.parameters()]
    for _ in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        reference.update_parameters(model)
        ema_update(averages, model.parameters(), 0.9)
    for average, expected in zip(averages, reference.module.parameters(), strict=True):
        torch.testing.assert_close(average, expected.detach())


def test_integers_and_booleans_are_copied():
    averages = [torch.tensor(3), torch.tensor([True, False]), torch.tensor([1, 2], dtype=torch.uint8), torch.zeros(1)]
    values = [torch.tensor(10), torch.tensor([False, False]), torch.tensor([7, 8], dtype=torch.uint8), torch.ones(1)]
    ema_update(averages, values, 0.75)
    assert [average.tolist() for average in averages] == [10, [False, False], [7, 8], [0.25]]
    assert [average.dtype for average in averages] == [value.dtype for value in values]


def test_equal_tensors_stay_bitwise_equal():
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    average = value.clone()
    for _ in range(50):
        ema_update([average], [value], 0.9993)
    assert torch.equal(average, value)


def test_an_average_in_float32_moves_where_bfloat16_would_stand_still():
    wide, narrow, value = (
        torch.ones(1),
        torch.ones(1, dtype=torch.bfloat16),
        torch.full((1,), 1.0625, dtype=torch.bfloat16),
    )
    for _ in range(1000):
        ema_update([wide], [value], ema_smoothing(1000))
        ema_update([narrow], [value], ema_smoothing(1000))
    assert wide.item() == pytest.approx(1.03125, abs=1e-4)  # half way after one half-life
    assert narrow.item() == 1.0


def test_ema_update_of_views_and_of_nothing():
    base = torch.zeros(2, 4)
    ema_update([base[:, 1], base.T[3]], [torch.ones(2), torch.ones(2)], 0.5)
    assert base.tolist() == [[0, 0.5, 0, 0.5]] * 2
    ema_update([], [], 0.5)


@pytest.mark.parametrize(
    ("averages", "values", "smoothing", "words"),
    [
        ([torch.zeros(1)], [torch.zeros(1)], 1.1, r"\[0, 1\]"),
        ([torch.zeros(1)], [], 0.5, "1 averages for 0 values"),
        ([torch.zeros(2)], [torch.zeros(1)], 0.5, "same order"),
    ],
)
def test_ema_update_says_what_is_wrong(averages, values, smoothing, words):
    with pytest.raises(ValueError, match=words):
        ema_update(averages, values, smoothing)


# --- sharpness-aware minimisation


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4),
    rho=st.floats(1e-3, 10),
    seed=st.integers(0, 2**31),
)
def test_sam_perturbation_has_length_rho_and_the_direction_of_the_gradient(shapes, rho, seed):
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    flat = torch.cat([g.flatten() for g in gradients]).double()
    step = torch.cat([s.flatten() for s in sam_perturbation(gradients, rho)]).double()
    torch.testing.assert_close(step, rho * flat / flat.norm(), rtol=1e-4, atol=1e-6)
    assert step.norm().item() == pytest.approx(rho, rel=1e-4)


def test_sam_perturbation_is_the_worst_step_of_its_length():
    """Equation 2: among the steps of length rho it maximises the linearised loss."""
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(5, generator=generator)
    (step,) = sam_perturbation([gradient], rho=0.3)
    others = F.normalize(torch.randn(500, 5, generator=generator), dim=1) * 0.3
    assert (others @ gradient).max() <= step @ gradient


def test_sam_perturbation_of_zero_gradients_is_zero():
    steps = sam_perturbation([torch.zeros(2), torch.zeros(3)])
    assert all(torch.equal(step, torch.zeros_like(step)) for step in steps)
    assert sam_perturbation([]) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sam_perturbation_keeps_dtypes_and_does_not_overflow(dtype):
    gradient = torch.full((100,), 3e4, dtype=dtype)  # the norm, 3e5, is beyond float16
    steps = sam_perturbation([gradient, torch.zeros(1, dtype=torch.float32)], rho=1.0)
    assert [step.dtype for step in steps] == [dtype, torch.float32]
    torch.testing.assert_close(steps[0].double(), torch.full((100,), 0.1, dtype=torch.double), rtol=1e-2, atol=0)
    assert torch.equal(gradient, torch.full_like(gradient, 3e4))


@pytest.mark.parametrize("arguments", [{"rho": -1.0}, {"epsilon": -1e-3}])
def test_sam_perturbation_refuses_negative_lengths(arguments):
    with pytest.raises(ValueError, match="negative"):
        sam_perturbation([torch.ones(1)], **arguments)


# --- gradient clipping


def test_clip_gradients_by_norm_is_torchs():
    ours = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    theirs = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    for parameters in (ours, theirs):
        parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([0.0, 4.0])
    clip_gradients(ours, "norm", 1.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad)
    assert math.hypot(*(p.grad.norm().item() for p in ours)) == pytest.approx(1.0, rel=1e-5)
