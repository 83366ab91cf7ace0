"""The loaders of a LightningModule or LightningDataModule as data of a `hocket.Trainer`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from hocket.data import Several
from hocket.data.source import known_length, set_epoch
from hocket.errors import WrongType, WrongValue
from hocket_migration.lightning.installed_lightning import package_of

#: Modes of Lightning's CombinedLoader that `Several` has, which resumes within an epoch and slices each loader by ranks.
_MODES = {"max_size_cycle": "cycle", "min_size": "shortest"}


def training(given: Any, framework: ModuleType, ordered: bool = False) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the training data, and a function that gives a batch the form in which Lightning passes it; None for no change.

    Args:
        ordered: whether loaders yield samples in the order of their data set, as with ``overfit_batches``.

    Raises:
        TypeError: the mode is not one of training.
    """
    combined = _combined(given, "max_size_cycle", framework, ordered)
    loaders, mode, spec = combined.flattened, combined._mode, combined._spec
    if mode == "sequential":
        raise WrongType(
            "CombinedLoader(mode='sequential') is not combined for training. Write mode='max_size_cycle', 'max_size' or "
            "'min_size'; for one loader after the other, hocket.data.Several(loaders, 'in turn')."
        )
    if spec.is_leaf():
        return bounded(loaders[0]), None
    if mode not in _MODES:
        return Combined(combined), None

    def unpack(batch: Any) -> Any:
        return tree_unflatten(list(batch.values()), spec)

    named = {str(number): bounded(each) for number, each in enumerate(loaders)}
    return Several(named, _MODES[mode]), unpack  # type: ignore[arg-type]


def evaluation(given: Any, framework: ModuleType, ordered: bool = False) -> list[Any]:
    """Return the loaders of an evaluation in their order. A mode other than ``"sequential"`` combines loaders into one."""
    if given is None:
        return []
    combined = _combined(given, "sequential", framework, ordered)
    return list(combined.flattened) if combined._mode == "sequential" else [Combined(combined)]


def prediction(given: Any, framework: ModuleType) -> list[Any]:
    """Return the loaders of a prediction, in their order. Raises TypeError for a mode that combines them."""
    found = evaluation(given, framework)
    if found and isinstance(found[0], Combined):
        raise WrongType("A prediction has one loader after the other. Write CombinedLoader(…, mode='sequential').")
    return found


def _combined(given: Any, mode: str, framework: ModuleType, ordered: bool) -> Any:
    """Return a CombinedLoader, which knows loaders in nested collections."""
    kind = type(given)
    if kind.__name__ != "CombinedLoader" or package_of(kind) is None:
        given = framework.utilities.CombinedLoader(given, mode)
    given.flattened = [Iterated(each) if _is_collection(each) else each for each in given.flattened]
    if ordered:
        stage = framework.trainer.states.RunningStage.TRAINING  # for the message
        framework.trainer.connectors.data_connector._resolve_overfit_batches(given, stage)
    return given


def _is_collection(given: Any) -> bool:
    """Whether data has items and a length, and no state as a loader may have."""
    has = functools.partial(hasattr, given)
    return has("__getitem__") and has("__len__") and not any(map(has, ("set_epoch", "state_dict")))


class Iterated:
    """The items of a list, a tensor or another collection as batches, as Lightning takes it in place of a loader."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Any:
        items = self._items
        # A map-style data set may have neither __iter__ nor an IndexError at its end.
        return iter(items) if hasattr(items, "__iter__") else (items[number] for number in range(len(items)))


class Combined:
    """The batches of a CombinedLoader, as one loader."""

    def __init__(self, combined: Any) -> None:
        self._combined = combined
        self.flattened = list(combined.flattened)

    def __len__(self) -> int:
        lengths = list(map(len, self._combined.flattened))
        return min(lengths) if self._combined._mode == "min_size" else max(lengths)

    def __iter__(self) -> Any:
        batches = (batch for batch, _, _ in self._combined)
        return islice(batches, known_length(self))  # the end of the longest loader would begin others anew

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of all loaders."""
        for each in self._combined.flattened:
            set_epoch(each, epoch)


class Reloaded:
    """A loader that another one may replace between two epochs, as with ``reload_dataloaders_every_n_epochs``.

    It has no length: the next loader may have another.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader."""
        set_epoch(self.loader, epoch)


def side_by_side(given: Any, framework: ModuleType, ordered: bool = False) -> Any:
    """Return training data as one loader, whose batches have the form in which Lightning passes them."""
    data, unpack = training(given, framework, ordered)
    return data if unpack is None else Combined(_combined(given, "max_size_cycle", framework, ordered))


def draw_as_iterated(loaders: Any) -> None:
    """Draw the random numbers that loaders draw when they are iterated, which Lightning does once more when it reloads."""
    for each in getattr(loaders, "flattened", None) or tree_leaves(loaders):
        if isinstance(each, DataLoader):
            torch.empty((), dtype=torch.int64).random_(generator=each.generator)


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader's samplers, as Lightning does before a validation."""
    loaders = getattr(loader, "flattened", [loader])
    owners = [owner for each in loaders for owner in (each, getattr(each, "batch_sampler", None))]
    samplers: list[Any] = [getattr(each, "sampler", None) for each in owners]
    for sampler in {id(each): each for each in samplers}.values():
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def one_of(loaders: Any, datamodule: Any) -> tuple[Any, Any]:
    """Return loaders and data module, where the first may have been given in place of the second."""
    if loaders is not None and any(base.__name__ == "LightningDataModule" for base in type(loaders).__mro__):
        if datamodule is not None:
            raise WrongType("Two data modules were given. Give one.")
        return None, loaders
    if loaders is not None and datamodule is not None:
        raise WrongType("Loaders and a data module were given. Give one of them.")
    return loaders, datamodule


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

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader."""
        set_epoch(self._loader, epoch)


def bounded(loader: Any) -> Any:
    """Return a loader that ends after as many batches as its length says, as Lightning ends it.

    A DataLoader over items, a collection and a loader with a state of its own are returned as they are.
    """
    if isinstance(loader, Sequence | Iterated | Combined | Limited | Several) or known_length(loader) is None:
        return loader
    data_set = getattr(loader, "dataset", None)
    if hasattr(loader, "state_dict") or hasattr(data_set, "state_dict"):
        return loader
    if isinstance(loader, DataLoader) and not isinstance(data_set, IterableDataset):
        return loader
    return Limited(loader, 1.0, 1)


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
            raise WrongValue(
                f"limit_…_batches={limit} is a share of {many} batches, which is not a number of batches. Give a number, "
                "such as 1."
            )
        return batches if batches == math.inf else int(batches)
    return min(length, limit)
