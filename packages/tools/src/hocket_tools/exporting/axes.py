"""Which axes of the inputs vary between predictions of different numbers of samples, or lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hocket.errors import WrongValue

#: By input: the names of its axes that vary; ``"batch"``, ``"length"``, or one of their own for sizes computed from them.
Axes = dict[str, dict[int, str]]
#: By input: axes of which users say that they vary.
Dynamic = Mapping[str, Sequence[int]]


def varying(traced: Mapping[str, Tensor], other: Sequence[Mapping[str, Tensor]], counts: Sequence[int]) -> Axes:
    """Return the axes that vary with the number of samples.

    Args:
        traced: inputs of ``counts[0]`` samples, by name.
        other: inputs of ``counts[1:]`` samples.
    """
    axes: Axes = {}
    for name, tensor in traced.items():
        for axis in range(tensor.dim()):
            sizes = [inputs[name].shape[axis] for inputs in (traced, *other)]
            if len(set(sizes)) > 1:
                axes.setdefault(name, {})[axis] = "batch" if sizes == list(counts) else f"{name}_{axis}"
    return axes


def lengths(inputs: Mapping[str, Tensor], dynamic: Dynamic, axes: Axes) -> dict[tuple[str, int], str]:
    """Return the axes of lengths: axes that users name, and of matrices of integers the one that is not the batch.

    Raises WrongValue for an input or axis that does not exist.
    """
    named: dict[tuple[str, int], str] = {}
    for name, axis in ((name, axis) for name, numbers in dynamic.items() for axis in numbers or [-1]):
        if name not in inputs or not 0 <= axis < inputs[name].dim():
            shapes = ", ".join(f"{each} {tuple(tensor.shape)}" for each, tensor in inputs.items())
            fits = next((each for each, tensor in inputs.items() if tensor.dim() > 1), next(iter(inputs)))
            raise WrongValue(
                f"«dynamic={dict(dynamic)!r}¦The dynamic axis {name}{f':{axis}' if axis >= 0 else ''}» is not an input of the "
                "model with the number of one of its axes, from 0. The inputs have samples in axis 0, and here the shapes "
                f"{shapes}. Write «dynamic={{'{fits}': [1]}}¦--dynamic {fits}:1, or `dynamic: {{{fits}: [1]}}` for a callback»."
            )
        named[name, axis] = f"{name}_{axis}"
    matrices = {name: each for name, each in inputs.items() if not each.is_floating_point() and each.dim() == 2}
    length = next((each.shape[1] for each in matrices.values()), 0)
    for name, each in matrices.items():
        if axes.get(name, {}).get(0) == "batch" and each.shape[1] == length and length > 3 and 1 not in axes[name]:
            named.setdefault((name, 1), "length")
    return named


def halved(inputs: Mapping[str, Tensor], chosen: Mapping[tuple[str, int], str]) -> dict[str, Tensor]:
    """Return the inputs with the first half of these axes."""
    shorter = dict(inputs)
    for name, axis in chosen:
        shorter[name] = shorter[name].narrow(axis, 0, shorter[name].shape[axis] // 2)
    return shorter
