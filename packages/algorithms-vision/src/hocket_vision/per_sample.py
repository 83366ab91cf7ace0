"""Transform samples of the training data one by one, where they are loaded, with reproducible random numbers; or batches."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hocket.basics.time import Time
from hocket.data.items import get_item, set_item
from hocket.data.loaders import end_workers, exchange_dataset
from hocket.data.source import underlying
from hocket.errors import Unsupported, WrongType, WrongValue
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.batch_part import BatchPart
from hocket.state.span import Span

if TYPE_CHECKING:
    from hocket.state.state import State

#: ``transform(image_or_sample, generator=...)``: one of the same kind. Transforms with an attribute ``by_place`` that is true
#: are called with ``(image_or_sample, (seed, epoch, index))`` instead.
Transform = Callable[..., Any]

#: The events on which :func:`apply_per_sample` acts.
PER_SAMPLE_EVENTS = frozenset({Event.FIT_START, Event.EPOCH_START, Event.BEFORE_DATALOADER, Event.FIT_END, Event.CLOSE})


class SampleOrBatchAlgorithm(Algorithm):
    """Base of algorithms that transform samples where they are loaded, or whole batches on ``after_dataloader``.

    Subclasses define :meth:`sample_transform` and :meth:`transform_batch`.

    Args:
        name: the algorithm's name, for messages.
        batch: whether to transform whole batches, and ``by_batch``, how users say so, for messages.
        start, stop: see `hocket.Span`; for batches only, because workers load samples ahead of the steps that use them.
        input_key: where the images are; see `hocket.data.BatchPart`.
    """

    phase = Phase.DATA

    def __init__(
        self,
        name: str,
        batch: bool,
        start: str | Time | None,
        stop: str | Time | None,
        input_key: Any,
        by_batch: str = "batch=True",
    ) -> None:
        if not batch and (start is not None or stop is not None):
            raise WrongValue(
                f"{name} was given start= or stop= and transforms samples where they are loaded, ahead of the steps that use "
                f"them. Pass {by_batch} to transform whole batches, or omit start= and stop=."
            )
        self.batch = batch
        self._by_batch = by_batch
        self._span = Span(start, stop)
        self._images = BatchPart(name, "input", input_key)
        self.events = {Event.AFTER_DATALOADER} if batch else PER_SAMPLE_EVENTS  # type: ignore[misc]

    def match(self, event: Event, state: State) -> bool:
        """Whether the current batch is between ``start`` and ``stop``."""
        return self._span.includes(state)

    def apply(self, event: Event, state: State) -> None:
        """Transform the batch, or each sample as it is loaded."""
        if self.batch:
            self.transform_batch(state)
        else:
            instead = f"pass {self._by_batch} to transform whole batches"
            apply_per_sample(self, event, state, self.sample_transform, instead=instead)

    def transform_batch(self, state: State) -> None:
        """Replace ``state.batch``."""
        raise Unsupported(f"{type(self).__name__} needs a transform_batch(state).")

    def sample_transform(self, state: State) -> tuple[Transform, Any]:
        """Return the ``transform`` and the ``input_key`` of a :class:`TransformedDataset`."""
        raise Unsupported(f"{type(self).__name__} needs a sample_transform(state).")


def is_pil(item: Any) -> bool:
    """Whether this is a PIL image; imports nothing."""
    return hasattr(item, "getbands")


def only_images(item: Any) -> bool:
    """Whether a batch or sample certainly has no targets: it is an image or a tensor, or a sequence of one item."""
    return isinstance(item, torch.Tensor) or is_pil(item) or (isinstance(item, list | tuple) and len(item) == 1)


def targets_of(part: BatchPart, state: State, without: str) -> Any:
    """Return the targets of ``state.batch``, or None if it is only images. A KeyError names the argument ``without`` them."""
    if only_images(state.batch):
        return None
    try:
        return part.of(state)
    except KeyError as error:
        error.add_note(f"If the batches have no targets, pass {without}.")
        raise


def part_of_sample(sample: Any, which: str, key: Any, without: str = "") -> Any:
    """Return the image or the target of a sample; ``which`` is "input" or "target". Raises KeyError if the sample lacks it."""
    try:
        return get_item(sample, key)
    except (LookupError, AttributeError, TypeError):
        found = type(sample).__name__
        if isinstance(sample, Mapping):
            found += f" with {', '.join(map(repr, sample))}"
        elif isinstance(sample, list | tuple):
            found += f" of {len(sample)}"
        raise KeyError(
            f"The {which} of a sample is not at {key!r}: the training data has samples that are each a {found}. Pass "
            f"{which}_key=, where it is in a sample"
            + (f", or {without} if samples have no {which}." if without else ".")
        ) from None


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
            raise WrongType(
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
        return set_item(sample, self._input_key, self._step(part_of_sample(sample, "input", self._input_key)))

    def __getattr__(self, name: str) -> Any:
        # Samplers and collate functions ask for .targets or .classes. Not for __getitems__, which would bypass us.
        if name.startswith("_") or name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)


def apply_per_sample(
    algorithm: Algorithm,
    event: Event,
    state: State,
    make: Callable[[State], tuple[Transform, Any]],
    *,
    instead: str = "call the functional form yourself",
) -> None:
    """Load every epoch of the training DataLoader from a :class:`TransformedDataset`.

    Algorithms call this in ``apply`` on ``PER_SAMPLE_EVENTS``. If several do, the first transforms first. An epoch keeps the
    data set that it started with, and persistent workers keep their copy of it. So the user's loader gets its own data set
    and workers back when the first batch is requested, and other uses of the loader, such as evaluation, see untransformed
    samples.

    Args:
        make: returns the ``transform`` and the ``input_key`` of the data set; called once for each loader and data set.
        instead: what users can do whose training data is not a DataLoader, for the message.

    Raises:
        TypeError: the training data is not a DataLoader over a map-style data set.
    """
    loader = underlying(state.train_loader)
    if not isinstance(loader, DataLoader):
        if event is Event.FIT_START:
            raise WrongType(
                f"Samples are transformed one by one where a DataLoader loads them, but the training data is "
                f"{type(loader).__name__}. Pass a torch.utils.data.DataLoader, or {instead}."
            )
        return
    if event is Event.FIT_START or event is Event.EPOCH_START:
        known, view = _views.get(algorithm, (None, None))
        if view is None or not view._replaced:
            if view is None or known is not loader or view.original is not loader.dataset:
                seed = state.generator(algorithm).initial_seed()
                transform, input_key = make(state)
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
