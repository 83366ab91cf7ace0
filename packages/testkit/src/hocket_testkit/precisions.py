"""The suite for precisions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.basics.losses import as_loss
from hocket.data.batches import count, split
from hocket.data.nesting import map_tensors
from hocket.precision import Precision
from hocket.state.task import SupervisedTask
from hocket_testkit.compare import difference
from hocket_testkit.conformance import weights
from hocket_testkit.footprint import changed, footprint
from hocket_testkit.reference import batch_norm_network
from hocket_testkit.runs import RunConformance

#: Steps that scaling may skip on one batch: from a scale of 2^24 halved down to 1.
_OVERFLOWS = 24
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class PrecisionConformance(RunConformance):
    """The tests that every precision must pass. Define ``make``, and ``gradient_tolerance`` for fewer bits than float32.

    Example:
        >>> import hocket
        >>> from hocket.precision.bf16 import BF16
        >>> class TestBF16(hocket.testkit.PrecisionConformance):
        ...     gradient_tolerance = 0.05
        ...     def make(self):
        ...         return BF16()
    """

    kind = "precisions"
    test_works_with_microbatches = None  # type: ignore[assignment]  # in test_the_gradient_is_close_to_that_in_float64
    test_works_in_bf16 = None  # type: ignore[assignment]  # a run has one precision
    test_works_in_every_combination = None  # type: ignore[assignment]  # its model has batch norm, which fsdp does not cast
    #: Allowed distance of the gradient from that in float64: the norm of the difference, divided by the norm. Also for losses.
    gradient_tolerance: ClassVar[float] = 1e-5
    #: The fewest bits in which the weights and statistics of normalisation layers may be kept.
    norm_bits: ClassVar[int] = 32

    def make(self) -> Precision:
        """Return a new precision."""
        precision: Precision = super().make()
        return precision

    def model(self) -> nn.Module:
        return batch_norm_network()

    def test_is_a_precision(self) -> None:
        precision = self.make()
        assert isinstance(precision, Precision), (
            f"{type(precision).__name__} is not a hocket.Precision. Inherit from it."
        )

    # --- numbers

    @pytest.mark.parametrize("microbatch", [None, 3])
    def test_the_gradient_is_close_to_that_in_float64(self, microbatch: int | None) -> None:
        """Optimizers and plug-ins see the unscaled gradient of the full batch, with or without microbatches.

        Steps skipped because scaling overflowed are repeated on the same batch; whether the first scale overflows depends on
        the processor's arithmetic.
        """
        expected, loss = self._reference(microbatch)
        seen = _Gradients()
        first = next(iter(self.seeded(self.data)))
        trainer = self.trainer(
            self.make(), train_data=[first], microbatch=microbatch, callbacks=[seen], clip_gradients=1e6
        )
        for _ in range(_OVERFLOWS + 1):
            trainer.fit("1ba")
            got = torch.cat([gradient.double().flatten().cpu() for gradient in seen.gradients])
            if got.isfinite().all():
                break
        else:
            raise AssertionError(
                f"The gradient of one batch was not finite {_OVERFLOWS + 1} times. If the loss is scaled, skip the step "
                "when that overflows, and scale the next loss by less."
            )
        distance = ((got - expected).norm() / expected.norm()).item()
        assert distance <= self.gradient_tolerance, (
            f"The gradient is {distance:.2g} of its norm away from that in float64, and gradient_tolerance is "
            f"{self.gradient_tolerance:g}. If the loss is scaled, unscale_gradients has to undo it; if so few "
            "bits cannot do better, declare it in gradient_tolerance."
        )
        assert abs(seen.loss - loss) <= self.gradient_tolerance * (1 + abs(loss)), (
            f"The loss is {seen.loss}, expected {loss}."
        )
        norm = expected.norm().item()
        assert abs(seen.norm - norm) <= self.gradient_tolerance * norm, (
            f"Clipping saw a gradient of norm {seen.norm:.4g}, expected {norm:.4g}: it has to be unscaled before."
        )

    def test_evaluation_is_close_to_float64(self) -> None:
        """The loss of an evaluation, and predictions; neither changes the weights or leaves gradients behind."""
        trainer = self.trainer(self.make())
        before = weights(trainer)
        data = self.seeded(self.data)
        loss = trainer.evaluate(data)["eval/loss"]
        task, batches = self._exact()
        task.eval()
        with torch.no_grad():
            outputs = [task(batch) for batch in batches]
            values = [
                as_loss(task.loss(o, b)).value.item() * count(b).samples for o, b in zip(outputs, batches, strict=True)
            ]
        expected = sum(values) / sum(count(batch).samples for batch in batches)
        assert abs(loss - expected) <= self.gradient_tolerance * (1 + abs(expected)), (
            f"Evaluation found a loss of {loss}, in float64 it is {expected}."
        )
        for got, exact in zip(_leaves(trainer.predict(data)), _leaves(outputs), strict=True):
            error = ((got.double() - exact).norm() / (1 + exact.norm())).item()
            assert error <= self.gradient_tolerance, f"Predictions are {error:.2g} of their norm away from float64."
            assert not got.requires_grad
        found = difference(weights(trainer), before, at="weights")
        assert found is None, f"Evaluation changed the weights: {found}."

    def test_normalisation_layers_keep_their_bits(self) -> None:
        """Their weights and statistics are finite, wide enough to change, and have changed."""
        trainer = self.trainer(self.make(), eval_data=None)
        norms = [module for module in trainer.state.task.modules() if isinstance(module, _NORMS)]
        before = [{k: v.clone() for k, v in norm.state_dict().items()} for norm in norms]
        trainer.fit()
        for norm, old in zip(norms, before, strict=True):
            for name, tensor in norm.state_dict().items():
                what = f"{type(norm).__name__}.{name}"
                if tensor.is_floating_point():
                    assert torch.finfo(tensor.dtype).bits >= self.norm_bits, (
                        f"{what} is {tensor.dtype}: a running mean in so few bits stops changing, and so do weights near 1. "
                        f"Keep it in float32, or declare norm_bits = {torch.finfo(tensor.dtype).bits}."
                    )
                    assert tensor.isfinite().all(), f"{what} is not finite after training."
                assert not torch.equal(tensor, old[name]), f"{what} did not change in training."

    # --- contexts and batches

    def test_contexts_nest_and_end(self) -> None:
        """``forward_context`` can be entered while it is entered, and again afterwards; what it sets is undone."""
        trainer = self.trainer(self.make())
        bus, before = trainer.state.bus, footprint()
        for _ in range(2):
            with bus.forward_context():
                inside = footprint()
                with bus.forward_context():
                    pass
                assert not changed(inside, footprint()), "Leaving the inner of two contexts ended the outer one, too."
            assert not changed(before, footprint()), (
                f"After the context {changed(before, footprint())} is not as before."
            )
        with pytest.raises(ZeroDivisionError), bus.forward_context():
            raise ZeroDivisionError
        assert not changed(before, footprint()), f"After an error {changed(before, footprint())} is not as before."

    def test_batches_are_converted_and_not_changed(self) -> None:
        """Integers, bools and values other than tensors are unchanged; the input batch is not written to."""
        bus = self.trainer(self.make()).state.bus
        batch = {
            "floats": torch.rand(3, 2), "ids": torch.arange(3), "mask": torch.tensor([True, False, True]),
            "names": ["a", "b", "c"], "nested": (torch.rand(3), [torch.tensor(1)]), "nothing": None,
        }  # fmt: skip
        before = copy.deepcopy(batch)
        converted = bus.convert_batch(batch)
        found = difference(batch, before, at="the batch")
        assert found is None, f"convert_batch changed its input: {found}. Return new tensors."
        for key in ("ids", "mask", "names", "nothing"):
            found = difference(converted[key], before[key], at=f"the batch's {key!r}")
            assert found is None, f"convert_batch changed a value that is not a floating-point tensor: {found}."
        assert converted["floats"].is_floating_point() and converted["nested"][0].dtype == converted["floats"].dtype

    # --- inside

    def _exact(self) -> tuple[Any, list[Any]]:
        """Return the task in float64, without a Trainer, and its batches."""
        model = self.seeded(self.model).double()
        task = model if isinstance(model, hocket.Task) else SupervisedTask(model, self.loss())
        wide = [map_tensors(lambda t: t.double() if t.is_floating_point() else t, b) for b in self.seeded(self.data)]
        return task, wide

    def _reference(self, microbatch: int | None) -> tuple[Tensor, float]:
        """Return gradient and loss of the first batch, by plain PyTorch in float64."""
        task, (batch, *_) = self._exact()
        samples, total = count(batch).samples, 0.0
        for part in split(batch, microbatch or samples):
            loss = as_loss(task.loss(task(part), part)).value * (count(part).samples / samples)
            loss.backward()
            total += loss.item()
        return torch.cat([p.grad.flatten() for p in task.parameters() if p.grad is not None]), total


class _Gradients(hocket.Callback):
    """Record a batch's gradients, loss and gradient norm."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.loss = self.norm = 0.0

    def after_train_batch(self, state: hocket.State) -> None:
        self.gradients = [p.grad.detach().clone() for p in state.task.parameters() if p.grad is not None]

    def batch_end(self, state: hocket.State) -> None:
        assert state.loss is not None and state.gradient_norm is not None
        self.loss, self.norm = state.loss.item(), state.gradient_norm.item()


def _leaves(nested: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) if tensor.is_floating_point() else None, list(nested))
    return found
