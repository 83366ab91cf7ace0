"""Compare what exported files compute with what the run predicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.errors import NotFinite
from hocket_tools.exporting.axes import Axes
from hocket_tools.exporting.formats import Run
from hocket_tools.exporting.portable import PortableModel

#: The largest difference that is allowed, of outputs up to 1; of larger ones it is relative to the largest.
TOLERANCE = 1e-4


class ExportDiffers(NotFinite):
    """Exported files compute something else than the run, or cannot be run at all."""


@dataclass(frozen=True)
class Sample:
    """Real inputs, and what the run predicts for them."""

    samples: int
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]

    def sizes(self, axes: Axes) -> dict[str, int]:
        """Return the size of each axis that varies, by its name."""
        return {
            label: self.inputs[name].shape[axis] for name, varying in axes.items() for axis, label in varying.items()
        }


@dataclass(frozen=True)
class Comparison:
    """The outputs for one batch: how many samples, which sizes, and the largest absolute differences."""

    samples: int
    sizes: Mapping[str, int]
    difference: float
    #: The largest magnitude that the run predicts.
    largest: float
    outputs: Mapping[str, float]

    @property
    def passed(self) -> bool:
        """Whether the difference is at most `TOLERANCE`, relative to outputs above 1."""
        return self.difference <= TOLERANCE * max(self.largest, 1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items()) or f"{self.samples} samples"
        return f"{sizes}: largest difference {self.difference:.2g} of outputs up to {self.largest:.3g}"


def compare(run: Run, samples: Sequence[Sample], axes: Axes) -> list[Comparison]:
    """Run each batch and compare it. Raises ExportDiffers if one cannot be run, or differs by more than `TOLERANCE`."""
    comparisons = []
    for sample in samples:
        sizes = sample.sizes(axes)
        try:
            actual = run(sample.inputs)
        except Exception as error:
            raise ExportDiffers(f"The exported model cannot be run on {sizes or 'a batch'}: {error}") from error
        if missing := sorted(actual.keys() - sample.expected.keys()):
            raise ExportDiffers(f"The exported model returns {missing[0]}, which the run does not predict.")
        by_output = {name: difference(actual[name], sample.expected[name]) for name in actual}
        largest = max((_largest(sample.expected[name]) for name in actual), default=0.0)
        comparisons.append(Comparison(sample.samples, sizes, max(by_output.values()), largest, by_output))
    worst = max(comparisons, key=lambda comparison: comparison.difference)
    if not all(comparison.passed for comparison in comparisons):
        raise ExportDiffers(
            f"The exported model does not compute what the run predicts: {worst}, and {TOLERANCE:g} is allowed."
        )
    return comparisons


_RANDOM = (
    " The model itself returns other outputs when it is called twice: look for dropout or random numbers that are not for "
    "training only, such as functional.dropout without «training=self.training»."
)


def cause(model: PortableModel, samples: Sequence[Sample]) -> str:
    """Return a sentence if a model computes another result for a batch twice, as with dropout in eval mode; else nothing."""
    one, other = (model.outputs(samples[-1].inputs) for _ in range(2))
    same = all(difference(one[name], other[name]) <= TOLERANCE * max(_largest(one[name]), 1.0) for name in one)
    return "" if same else _RANDOM


def check_finite(samples: Sequence[Sample], outputs: Collection[str]) -> None:
    """Raise ExportDiffers for predictions that verify nothing: NaN, which equals NaN, or no finite value in an output."""
    for sample in samples:
        for name in outputs:
            tensor = sample.expected[name]
            broken = tensor.isnan().any() or (tensor.numel() and not tensor.isfinite().any())
            if not tensor.is_floating_point() or not broken:
                continue
            inputs = [each for each, value in sample.inputs.items() if not value.isfinite().all()]
            why = (
                f"for samples whose input '{inputs[0]}' is not finite. Verify with other data"
                if inputs
                else "for finite weights and inputs. Look for a division by zero, or a logarithm, in the model"
            )
            raise ExportDiffers(f"The model returns NaN or infinity in '{name}', which verifies nothing, {why}.")


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; NaN and infinities are equal to themselves. Infinite for other shapes.

    Example:
        >>> import torch
        >>> from hocket_tools.exporting.verification import difference
        >>> difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan]))
        0.5
    """
    if actual.shape != expected.shape:
        return torch.inf
    one, other = (tensor.detach().cpu().to(_wide(tensor)) for tensor in (actual, expected))
    equal = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(equal, 0)
    return float(apart.nan_to_num(torch.inf, torch.inf).max()) if apart.numel() else 0.0


def _largest(tensor: Tensor) -> float:
    finite = tensor.detach().cpu().to(_wide(tensor)).abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
