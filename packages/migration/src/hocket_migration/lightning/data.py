"""The loaders of a LightningModule or LightningDataModule as data of a `hocket.Trainer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from hocket.data import Several
from hocket_migration.lightning.framework import package_of

#: Modes of Lightning's CombinedLoader.
_MODES = {"max_size_cycle": "cycle", "min_size": "shortest"}


def training(given: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the training data, and a function that gives a batch the form in which Lightning passes it; None for no change.

    Raises TypeError for collections that hocket does not combine.
    """
    mode = "max_size_cycle"
    if type(given).__name__ == "CombinedLoader" and package_of(type(given)) is not None:
        mode, given = given._mode, given.iterables
        if mode not in _MODES:
            raise TypeError(
                f"CombinedLoader(mode={mode!r}) is not combined for training. Write {' or '.join(map(repr, _MODES))}; or "
                "hocket.data.Several, which has further modes."
            )
    elif not isinstance(given, list | tuple | Mapping) or _is_batches(given):
        return given, None
    if isinstance(given, Mapping):
        loaders, unpack = {str(name): each for name, each in given.items()}, None
    elif isinstance(given, list | tuple):
        loaders = {str(number): each for number, each in enumerate(given)}
        kind = type(given)

        def unpack(batch: Any) -> Any:
            return kind(batch.values())

    else:
        return given, None
    if any(isinstance(each, list | tuple | Mapping) for each in loaders.values()):
        raise TypeError(
            "The training loaders are nested collections. Give one list or dict of loaders, or hocket.data.Several."
        )
    return Several(loaders, _MODES[mode]), unpack  # type: ignore[arg-type]


def _is_batches(given: Any) -> bool:
    """Whether a list holds batches, and not loaders."""
    from torch import Tensor

    return isinstance(given, list | tuple) and any(
        isinstance(each, Tensor | list | tuple | Mapping) or not hasattr(each, "__iter__") for each in given
    )


def evaluation(given: Any) -> list[Any]:
    """Return the loaders of an evaluation, in their order."""
    if type(given).__name__ == "CombinedLoader" and package_of(type(given)) is not None:
        if given._mode != "sequential":
            raise TypeError(
                f"CombinedLoader(mode={given._mode!r}) is not combined for evaluation. Write mode='sequential'."
            )
        given = given.iterables
    if isinstance(given, Mapping):
        return list(given.values())
    if isinstance(given, list | tuple) and not _is_batches(given):
        return list(given)
    return [] if given is None else [given]


def labelled(loaders: list[Any], name: str) -> dict[str, Any]:
    """Return loaders by label: the name of the method that made them, and their number if there are several."""
    return {name if len(loaders) == 1 else f"{name}_{number}": each for number, each in enumerate(loaders)}


class Limited:
    """The first batches of a loader."""

    def __init__(self, loader: Any, limit: int | float, ranks: int) -> None:
        self._loader, self._limit = loader, limit if isinstance(limit, float) else limit * ranks

    def __len__(self) -> int:
        return int(limited(self._loader, self._limit))

    def __iter__(self) -> Any:
        return islice(iter(self._loader), len(self))


def limited(loader: Any, limit: int | float) -> int | float:
    """Return the number of batches of a loader under a limit, or infinity."""
    try:
        length: int | float = len(loader)
    except TypeError:
        length = math.inf
    if isinstance(limit, float):
        batches = length if limit == 1.0 else 0 if limit == 0.0 else length * limit
        if 0 < batches < 1 or (limit < 1.0 and batches == math.inf):
            many = "an unknown number of" if length == math.inf else length
            raise ValueError(
                f"limit_…_batches={limit} is a share of {many} batches, which is not a number of batches. Give a number, "
                "such as 1."
            )
        return batches if batches == math.inf else int(batches)
    return min(length, limit)
