"""The chunked cross entropy against torch's on all logits: values, gradients, dtypes and memory."""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hocket_nlp import linear_cross_entropy as module
from hocket_nlp.functional import linear_cross_entropy
from hocket_testkit import run_ranks


def make(rows: int, width: int, words: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, width), (words, width), (words,)
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return (*made, torch.randint(words, (rows,), generator=generator))


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z: float = 0.0) -> Tensor:
    """The sum over labels that count, from all logits."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    counted = logits[labels != -100]
    return F.cross_entropy(logits, labels, reduction="sum") + z * (counted.exp().sum(1).log() ** 2).sum()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 5),
    words=st.integers(2, 40),
    chunk=st.integers(1, 12) | st.none(),
    z=st.sampled_from([0.0, 0.3]),
    with_bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored=st.integers(0, 9),
)
def test_value_and_gradients_are_those_of_torch(rows, width, words, chunk, z, with_bias, reduction, ignored) -> None:
    hidden, weight, bias, labels = make(rows, width, words, torch.float64, rows + words)
    labels[:ignored] = -100
    given_bias = bias if with_bias else None
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    loss = linear_cross_entropy(hidden, weight, labels, given_bias, z_loss=z, reduction=reduction, chunk_rows=chunk)
    expected = plain(hidden, weight, given_bias, labels, z)
    number = int((labels != -100).sum())
    if reduction == "mean":
        assert loss.isnan() if not number else True
        expected = expected / max(number, 1)
    if number or reduction == "sum":
        torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(3 * loss, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)  # zeros, and no NaN, if no label counts


def test_gradients_by_finite_differences() -> None:
    hidden, weight, bias, labels = make(5, 3, 7, torch.float64)
    labels[1] = -100
    assert torch.autograd.gradcheck(
        lambda *inputs: linear_cross_entropy(inputs[0], inputs[1], labels, inputs[2], z_loss=0.1, chunk_rows=2),
        (hidden, weight, bias),
    )


def test_large_logits_stay_finite_and_leading_dimensions_are_kept() -> None:
    hidden, weight, _, labels = make(6, 4, 9)
    hidden, labels = (hidden * 1e3).detach().view(2, 3, 4).requires_grad_(), labels.view(2, 3)
    loss = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten()))
    loss.backward()
    assert hidden.grad is not None and hidden.grad.shape == (2, 3, 4) and hidden.grad.isfinite().all()


def test_backward_twice_and_two_uses_add_up() -> None:
    hidden, weight, _, labels = make(6, 4, 9)
    (once,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden)
    loss = linear_cross_entropy(hidden, weight, labels)
    for factor in (1, 3):
        (again,) = torch.autograd.grad(factor * loss, hidden, retain_graph=True)
        torch.testing.assert_close(again, factor * once)
    both = linear_cross_entropy(hidden, weight, labels) + linear_cross_entropy(hidden, weight, labels, chunk_rows=1)
    torch.testing.assert_close(torch.autograd.grad(both, hidden)[0], 2 * once)
    with pytest.raises(NotImplementedError, match="create_graph=True"):  # which would otherwise be constants
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden, create_graph=True)


def test_frozen_weights_and_no_grad_compute_no_gradients(monkeypatch) -> None:
    hidden, weight, bias, labels = make(6, 4, 9)
    kept: list[tuple[Tensor | None, ...]] = []
    real = torch.autograd.function.FunctionCtx.save_for_backward
    monkeypatch.setattr(
        torch.autograd.function.FunctionCtx,
        "save_for_backward",
        lambda ctx, *each: kept.append(each) or real(ctx, *each),
    )
    linear_cross_entropy(hidden, weight.detach(), labels, bias.detach()).backward()
    with torch.no_grad():
        value = linear_cross_entropy(hidden, weight, labels)
    assert [[each is not None for each in tensors] for tensors in kept] == [[True, False, False], [False] * 3]
    assert not value.requires_grad


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_bfloat16_products_and_wider_sums(how) -> None:
    hidden, weight, _, labels = make(40, 8, 300)
    low = [each.detach().bfloat16().requires_grad_() for each in (hidden, weight)]
    exact = plain(low[0].float(), low[1].float(), None, labels) / 40
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=7)
        inputs = [hidden, weight]
    else:
        loss, inputs = linear_cross_entropy(*low, labels, chunk_rows=7), low
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=2e-3)
    gradients = torch.autograd.grad(loss, inputs)
    for ours, theirs, given_ in zip(gradients, torch.autograd.grad(exact, low), inputs, strict=True):
        assert ours.dtype == given_.dtype
        assert (ours.float() - theirs.float()).norm() < 0.01 * theirs.float().norm()


def test_sums_over_many_chunks_are_not_rounded_to_bfloat16() -> None:
    """The gradient of the bias is a sum of 2,000 equal numbers, which bfloat16 would stop adding at 256 of them."""
    hidden = torch.zeros(2000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    total = linear_cross_entropy(
        hidden, weight, torch.zeros(2000, dtype=torch.long), bias, reduction="sum", chunk_rows=1
    )
    total.backward()
    assert bias.grad is not None and bias.grad.tolist() == [-1000, 1000]
    assert total.item() == pytest.approx(2000 * 0.693147, rel=1e-5)


def test_what_does_not_fit_is_named() -> None:
    hidden, weight, _, labels = make(6, 4, 9)
    with pytest.raises(ValueError, match=r"Labels of shape \(5,\), hidden states of shape \(6, 4\).*\(9, 4\)"):
        linear_cross_entropy(hidden, weight, labels[:5])
    with pytest.raises(ValueError, match="do not fit together"):
        linear_cross_entropy(hidden, weight.T, labels)
    with pytest.raises(ValueError, match="'none'"):
        linear_cross_entropy(hidden, weight, labels, reduction="none")
    with pytest.raises(ValueError, match="chunk_rows is 0"):
        linear_cross_entropy(hidden, weight, labels, chunk_rows=0)
    with pytest.raises(ValueError, match=r"in \[0, 9\).*range from 11 to 16"):
        linear_cross_entropy(hidden, weight, labels + 9)


def test_a_weight_that_is_divided_over_ranks_is_refused() -> None:
    def rank_main(rank: int) -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        hidden, weight, _, labels = make(6, 4, 9)
        divided = distribute_tensor(weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(
            NotImplementedError, match=r"do not divide the output layer by tensor parallelism.*FSDP is"
        ) as error:
            linear_cross_entropy(hidden, divided, labels)
        return str(error.value)

    assert run_ranks(rank_main, 1)


def test_compiles_with_a_break_of_the_graph() -> None:
    hidden, weight, _, labels = make(6, 4, 9)
    compiled = torch.compile(lambda *inputs: 2 * linear_cross_entropy(*inputs), backend="eager")
    torch.testing.assert_close(compiled(hidden, weight, labels), 2 * linear_cross_entropy(hidden, weight, labels))


def test_chunks_are_as_large_as_hidden_states_or_the_smallest(monkeypatch) -> None:
    rows: list[int] = []
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda inputs, *rest: rows.append(len(inputs)) or real(inputs, *rest))
    monkeypatch.setattr(module, "_SMALLEST_CHUNK", 200)
    hidden, weight, _, labels = make(30, 20, 100)
    linear_cross_entropy(hidden, weight, labels)
    assert rows == [6] * 5
    rows.clear()
    linear_cross_entropy(hidden[:5], weight, labels[:5])
    assert rows == [2, 2, 1]
    rows.clear()
    linear_cross_entropy(hidden, weight, labels, chunk_rows=25)
    assert rows == [25, 5]


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_kept_kernel_is_called_if_it_can_sum_in_float32(accumulates, monkeypatch) -> None:
    """With a stand-in for Liger's kernel, of the same signature: the real one is for GPUs."""

    class Kernel:
        def __init__(self, ignore_index: int = -100, reduction: str = "mean", **options: Any) -> None:
            self.options = {"ignore_index": ignore_index, "reduction": reduction}
            assert options == {"accum_dtype": torch.float32}

        def __call__(self, weight: Tensor, hidden: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
            return F.cross_entropy(F.linear(hidden, weight, bias), labels, **self.options).bfloat16()

    signature = inspect.signature(Kernel)
    more = inspect.Parameter("accum_dtype", inspect.Parameter.KEYWORD_ONLY, default=None)
    if accumulates:
        signature = signature.replace(parameters=[*list(signature.parameters.values())[:2], more])
    Kernel.__signature__ = signature  # type: ignore[attr-defined]
    found = types.ModuleType("liger_kernel.transformers")
    found.LigerFusedLinearCrossEntropyLoss = Kernel  # type: ignore[attr-defined]
    package = types.ModuleType("liger_kernel")
    package.__spec__ = importlib.machinery.ModuleSpec("liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", found)
    kernel = module._liger()
    assert (kernel is not None) is accumulates
    if kernel is not None:
        hidden, weight, bias, labels = make(6, 4, 9)
        labels[0] = 3
        total = kernel(hidden, weight, labels, bias, 3)
        expected = F.cross_entropy(hidden @ weight.T + bias, labels, ignore_index=3, reduction="sum")
        assert total.dtype == torch.float32 and total.item() == pytest.approx(expected.item(), rel=1e-2)


# --- memory


def test_memory_at_a_vocabulary_of_50_000(peak_memory) -> None:
    """At most 0.4 of the plain loss's, and equal to 1e-5."""
    hidden, weight, _, labels = make(1024, 32, 50_000)
    found = []
    for loss in (
        lambda: F.cross_entropy(hidden @ weight.T, labels),
        lambda: linear_cross_entropy(hidden, weight, labels),
    ):
        hidden.grad = weight.grad = None
        peak, value = peak_memory(lambda loss=loss: loss_and_gradients(loss))
        found.append((peak, value, hidden.grad, weight.grad))
    (plain_peak, *expected), (fused_peak, *values) = found
    assert plain_peak > 2 * 1024 * 50_000 * 4  # bytes: logits and their gradients
    assert fused_peak <= 0.4 * plain_peak
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)


def loss_and_gradients(loss) -> Tensor:
    value = loss()
    value.backward()
    return value.detach()
