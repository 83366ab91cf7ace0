"""Transform samples of the training data one by one, where they are loaded, with reproducible random numbers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hocket.data.items import get_item, set_item
from hocket.data.loaders import end_workers, exchange_dataset
from hocket.data.source import underlying
from hocket.hookspecs import Event

if TYPE_CHECKING:
    from hocket.algorithm import Algorithm
    from hocket.state import State

#: ``transform(image_or_sample, generator=...)``: one of the same kind. Transforms with an attribute ``by_place`` that is true
#: are called with ``(image_or_sample, (seed, epoch, index))`` instead.
Transform = Callable[..., Any]

#: The events on which :func:`apply_per_sample` acts.
PER_SAMPLE_EVENTS = frozenset({Event.FIT_START, Event.EPOCH_START, Event.BEFORE_DATALOADER, Event.FIT_END, Event.CLOSE})


def is_pil(item: Any) -> bool:
    """Whether this is a PIL image; imports nothing."""
    return hasattr(item, "getbands")


class TransformedDataset(Dataset[Any]):
    """A view of a map-style dataset that transforms every sample, or the image in it.

    With ``input_key=None``, ``transform`` gets the sample. Otherwise it gets an image: before conversion to a tensor if
    ``dataset`` is a ``torchvision`` dataset with a ``transform`` (or a ``Subset`` of one), or else item ``input_key`` of
    the sample. ``dataset`` itself is not changed.

    The random numbers of a sample are a function of ``seed``, :attr:`epoch` and its index. They do not depend on the
    number of workers or ranks, or on interruptions.

    Raises TypeError for a dataset without indices.
    """

    def __init__(self, dataset: Any, transform: Transform, seed: int, input_key: Any = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "Samples are transformed one by one in a map-style dataset, one with __getitem__, but the training data comes "
                f"from {type(dataset).__name__}. Call the functional form in that dataset itself, for instance "
                "hocket_vision.functional.augmix(image)."
            )
        self.original = dataset
        self._step = _Step(transform)
        self._input_key = input_key
        self._seed = seed
        self._look_inside()
        # In shared memory: persistent workers hold copies of this object for the whole run.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def _look_inside(self) -> None:
        self._inserted = None if self._input_key is None else _insert(self.original, self._step)

    @property
    def epoch(self) -> int:
        """The epoch for which random numbers are drawn; changes reach running workers."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)
        self._look_inside()  # the data set's transform may have been replaced

    # At the start of an epoch, a view replaces the data set of a loader.

    #: Persistent workers that load from this view; the replaced data set and its workers.
    _workers: Any = None
    _replaced: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_workers", "_replaced")}

    def _put_in(self, loader: DataLoader[Any]) -> None:
        self._replaced = exchange_dataset(loader, self, self._workers)

    def _take_out(self, loader: DataLoader[Any]) -> None:
        assert self._replaced is not None
        replaced, self._replaced = self._replaced, None
        _, self._workers = exchange_dataset(loader, *replaced)

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: Any) -> Any:
        words = np.random.SeedSequence([self._seed, self.epoch, int(index)]).generate_state(1)
        self._step.generator.manual_seed(int(words[0]))
        self._step.place = self._seed, self.epoch, int(index)
        if self._inserted is not None:
            return self._inserted[index]
        sample = self.original[index]
        if self._input_key is None or isinstance(sample, torch.Tensor) or is_pil(sample):
            return self._step(sample)
        return set_item(sample, self._input_key, self._step(get_item(sample, self._input_key)))

    def __getattr__(self, name: str) -> Any:
        # Samplers and collate functions ask for .targets or .classes. Not for __getitems__, which would bypass us.
        if name.startswith("_") or name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)


def apply_per_sample(algorithm: Algorithm, event: Event, state: State, transform: Transform, input_key: Any) -> None:
    """Load every epoch of the training DataLoader from a :class:`TransformedDataset`.

    Algorithms call this in ``apply`` on ``PER_SAMPLE_EVENTS``. If several do, the first transforms first. An epoch keeps the
    data set that it started with, and persistent workers keep their copy of it. So the user's loader gets its own data set
    and workers back when the first batch is requested, and other uses of the loader, such as evaluation, see untransformed
    samples. Raises TypeError for training data that is not a DataLoader over a map-style data set.
    """
    loader = underlying(state.train_loader)
    if not isinstance(loader, DataLoader):
        if event is Event.FIT_START:
            raise TypeError(
                f"Samples are transformed one by one where a DataLoader loads them, but the training data is "
                f"{type(loader).__name__}. Pass a torch.utils.data.DataLoader, or call the functional form yourself."
            )
        return
    if event is Event.FIT_START or event is Event.EPOCH_START:
        known, view = _views.get(algorithm, (None, None))
        if view is None or not view._replaced:
            if view is None or known is not loader or view.original is not loader.dataset:
                seed = state.generator(algorithm).initial_seed()
                view = TransformedDataset(loader.dataset, transform, seed, input_key)
                _views[algorithm] = loader, view
            view._put_in(loader)
        view.epoch = state.timestamp.epoch
        return
    while isinstance(loader.dataset, TransformedDataset) and loader.dataset._replaced:
        loader.dataset._take_out(loader)
    if event is Event.CLOSE:
        _, view = _views.pop(algorithm, (None, None))
        if view is not None:
            end_workers(None, view._workers)


#: By algorithm: the view, and the loader whose data set it replaces.
_views: weakref.WeakKeyDictionary[Algorithm, tuple[DataLoader[Any], TransformedDataset]] = weakref.WeakKeyDictionary()


class _Step:
    """A transform that draws from the current sample's random numbers, to be inserted among other transforms."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self.generator = torch.Generator()
        #: The seed, the epoch and the index of the current sample.
        self.place = 0, 0, 0

    def __call__(self, item: Any) -> Any:
        if getattr(self.transform, "by_place", False):
            return self.transform(item, self.place)
        return self.transform(item, generator=self.generator)

    def __repr__(self) -> str:
        return repr(self.transform)


def _insert(dataset: Any, step: _Step) -> Any:
    """Return a shallow copy of ``dataset`` with ``step`` among its transforms, or None if it has no transform for images."""
    from torchvision.datasets import VisionDataset
    from torchvision.datasets.vision import StandardTransform

    nested = {Subset: "dataset", TransformedDataset: "_inserted"}
    for kind, attribute in nested.items():
        if isinstance(dataset, kind):
            inner = _insert(getattr(dataset, attribute), step)
            if inner is None:
                return None
            view = copy.copy(dataset)
            setattr(view, attribute, inner)
            return view
    if not isinstance(dataset, VisionDataset):
        return None
    joint = getattr(dataset, "transforms", None)
    if joint is not None and not isinstance(joint, StandardTransform):
        return None  # an opaque function of image and target together
    view = copy.copy(dataset)
    view.transform = _before_tensors(getattr(dataset, "transform", None), step)
    view.transforms = StandardTransform(view.transform, getattr(dataset, "target_transform", None))
    return view


def _before_tensors(transform: Any, step: _Step) -> Any:
    """Return ``transform`` with ``step`` before the conversion to a tensor, or at the end."""
    from torchvision.transforms import Compose, PILToTensor, ToTensor, v2

    if transform is None:
        return step
    steps = list(transform.transforms) if isinstance(transform, Compose | v2.Compose) else [transform]
    makes_tensor = (ToTensor, PILToTensor, v2.ToImage, v2.ToTensor, v2.PILToTensor)
    place = next((i for i, one in enumerate(steps) if isinstance(one, makes_tensor)), len(steps))
    return Compose([*steps[:place], step, *steps[place:]])
