"""Compare nested values bitwise or within a tolerance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def difference(got: Any, expected: Any, tolerance: float = 0.0, at: str = "") -> str | None:
    """Return a description of the first difference, or None. NaN equals NaN.

    Args:
        got, expected: tensors, numbers and anything else that has ``==``, in mappings, sequences and dataclasses.
        tolerance: for floating-point values, absolute and relative to the largest expected value of the tensor; 0 for
            equal bits. Shapes and dtypes are always compared.
        at: path of the two in an enclosing value, for the description.
    """
    here = at or "the value"
    if isinstance(expected, Tensor):
        return _tensors(got, expected, tolerance, here)
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or list(got) != list(expected):
            keys = list(got) if isinstance(got, Mapping) else type(got).__name__
            return f"{here} has keys {keys}, expected {list(expected)}"
        return _first((got[key], expected[key], f"{at}[{key!r}]") for key in expected)(tolerance)
    if isinstance(expected, list | tuple):
        if type(got) is not type(expected) or len(got) != len(expected):
            return f"{here} is {got!r}, expected {expected!r}"
        return _first((g, e, f"{at}[{i}]") for i, (g, e) in enumerate(zip(got, expected, strict=True)))(tolerance)
    if dataclasses.is_dataclass(expected) and not isinstance(expected, type) and type(got) is type(expected):
        names = [field.name for field in dataclasses.fields(expected)]
        return _first((getattr(got, n), getattr(expected, n), f"{at}.{n}") for n in names)(tolerance)
    if isinstance(expected, float) and isinstance(got, float):
        near = math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
        return (
            None if near or (math.isnan(got) and math.isnan(expected)) else f"{here} is {got!r}, expected {expected!r}"
        )
    return None if got is expected or bool(got == expected) else f"{here} is {got!r}, expected {expected!r}"


def _first(triples: Any) -> Any:
    def search(tolerance: float) -> str | None:
        return next((found for g, e, at in triples if (found := difference(g, e, tolerance, at))), None)

    return search


def _tensors(got: Any, expected: Tensor, tolerance: float, here: str) -> str | None:
    if not isinstance(got, Tensor):
        return f"{here} is {type(got).__name__}, expected a tensor"
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"{here} is {tuple(got.shape)} of {got.dtype}, expected {tuple(expected.shape)} of {expected.dtype}"
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if not expected.is_floating_point() and not expected.is_complex():
        return None if torch.equal(got, expected) else f"{here} differs in {int((got != expected).sum())} elements"
    # Equal bits count even where the difference of two infinities is not a number.
    unequal = (got != expected) & ~(got.isnan() & expected.isnan())
    if not unequal.any():
        return None
    distance = (got.double() - expected.double()).abs()[unequal]
    scale = expected[expected.isfinite()].abs().max().double().item() if expected.isfinite().any() else 0.0
    if bool((distance <= tolerance * (1 + scale)).all()) and tolerance:
        return None
    return (
        f"{here} differs in {int(unequal.sum())} of {expected.numel()} elements, by up to {distance.max().item():.3g}"
    )
