"""The differences between weights and the module that they are loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What was loaded, and the misfits: names missing from the weights, or from the module, and names with different shapes.

    It is true if there are misfits; ``str(report)`` counts and lists them.

    Example:
        >>> import torch
        >>> from hocket.checkpoints import load_weights
        >>> report = load_weights(torch.nn.Linear(2, 1), {"weight": torch.ones(1, 2)}, strict=False)
        >>> report.missing
        ('bias',)
        >>> print(report)
        1 tensor loaded, 1 missing from the weights
        missing from the weights: bias
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """Name, shape in the weights, shape in the module."""
    loaded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Names of the module that ``ignore`` matches."""
    removed: str = ""
    """The prefix of a wrapper that was removed from all names, such as ``module.``."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        kinds = {
            "ignored": self.ignored,
            "missing from the weights": self.missing,
            "not in the module": self.unexpected,
            "of another shape": [
                f"{name} ({list(given)}, the module has {list(own)})" for name, given, own in self.mismatched
            ],
        }
        found = {what: names for what, names in kinds.items() if names}
        loaded = f"{len(self.loaded)} tensor{'s' if self.loaded[1:] else ''} loaded"
        loaded += f", without the prefix '{self.removed}' that all names had" if self.removed else ""
        counts = [", ".join([loaded, *(f"{len(names)} {what}" for what, names in found.items())])] * bool(self.loaded)
        fits = ["everything fits" if self.loaded else "nothing was loaded"] * (not self)
        return "\n".join([*counts, *(f"{what}: {some(names)}" for what, names in found.items()), *fits])


def some(names: Sequence[str], most: int = 20) -> str:
    """List the first names, and say how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def mismatched(given: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[tuple[str, Shape, Shape], ...]:
    """Return the names with different shapes in the weights and in the module, and both shapes."""
    theirs, ours = shapes_of(given), shapes_of({name: each for name, each in own.items() if not is_lazy(each)})
    return tuple((name, each, ours[name]) for name, each in theirs.items() if name in ours and each != ours[name])


def own_model(place: object) -> str:
    """Return what to type for weights of another model: the run that they are of, if they are in its folder."""
    path = Path(place) if isinstance(place, str | Path) else Path()
    from hocket.basics.run_files import CONFIG  # only needed for error messages

    run = next((each for each in (path, *path.parents[:2]) if each.name and (each / CONFIG).is_file()), None)
    if run is None:
        return "Give the configuration that they were trained with, such as config.yaml in the folder of their run"
    return f"They are of the run {run}: name that run, and override nothing of its model"


def shapes_of(weights: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of all tensors by name."""
    return {name: tuple(each.shape) for name, each in weights.items() if isinstance(each, Tensor)}


def listed(paths: list[str], most: int = 6) -> str:
    """Return the first paths as a Python list to type."""
    shown = [f"'{path}'" for path in paths[:most]]
    return f"[{', '.join([*shown, '…'] if len(paths) > most else shown)}]"


def suggested_remap(report: Report, given: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """Return the prefixes by which most unexpected weights fit the missing ones, and how many fit by them.

    Such as ``{"module.": ""}``; an empty dict and 0 if fewer than half of the smaller number fit.
    """
    missing, shapes, wanted = set(report.missing), shapes_of(given), shapes_of(own)
    best: tuple[dict[str, str], int] = ({}, 0)
    first = report.unexpected[0].split(".") if report.unexpected else []
    for name in report.missing:
        parts, common = name.split("."), 0
        while common < min(len(parts), len(first)) and parts[-1 - common] == first[-1 - common]:
            common += 1
        if not common:
            continue
        old, new = ("".join(f"{part}." for part in names[: len(names) - common]) for names in (first, parts))
        moved = {each: new + each[len(old) :] for each in report.unexpected if each.startswith(old)}
        fit = sum(to in missing and shapes.get(each) == wanted.get(to) for each, to in moved.items())
        best = max(best, ({old: new}, fit), key=lambda each: each[1])
    return best if 2 * best[1] >= min(len(report.missing), len(report.unexpected)) else ({}, 0)
