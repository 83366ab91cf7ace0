"""The registry of data adapters, tried in the order of their priority."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hocket.basics.plugin_errors import summarize
from hocket.data.rank_slices import Slices
from hocket.data.source import Source
from hocket.errors import WrongType
from hocket.help import warn

if TYPE_CHECKING:
    from hocket.data.sources.base import DataSource

_Adapter = TypeVar("_Adapter", bound="type[DataSource]")

#: Those of libraries, in the order in which they were registered.
_FURTHER: list[type[DataSource]] = []


def adapter(cls: _Adapter) -> _Adapter:
    """Register an adapter in this process, for all data for which its ``serves`` returns True.

    Adapters are tried in the order of their ``priority``, the highest first. A library registers its adapter in the module
    that defines the data.

    Example:
        >>> import hocket.data
        >>> class Numbers:
        ...     def start_at(self, batch): return iter(range(batch, 10))
        >>> @hocket.data.adapter
        ... class NumbersSource(hocket.data.DataSource):
        ...     kind = "numbers"
        ...     @classmethod
        ...     def serves(cls, data): return type(data).__name__ == "Numbers"
        ...     def read(self, done): return self.data.start_at(done)
        >>> hocket.data.adapt(Numbers()).kind
        'numbers'

    Raises TypeError for a class that is not a `DataSource` with a ``kind``.
    """
    from hocket.data.sources.base import DataSource

    if not (isinstance(cls, type) and issubclass(cls, DataSource) and cls.kind):
        raise WrongType(f"{cls!r} is not an adapter: subclass hocket.data.DataSource and give it a kind.")
    register(cls)
    return cls


def register(cls: Any) -> None:
    """Add an adapter; unlike `adapter`, of any class that makes sources."""
    _FURTHER.append(cls)


class CombinedLoaders:
    """The base of data that combines several loaders, such as `hocket.data.Several`: each is checked and prepared by itself.

    The data's ``repr`` says how they are combined; all ranks have to agree on it.
    """

    #: The loaders by name.
    loaders: Mapping[str, Iterable[Any]]

    def prepared(self, prepare_data: Callable[..., Any], train: bool, global_batch: int | None) -> Source:
        """Return this rank's slices of the data, combined of those of the loaders; see `prepared`."""
        raise NotImplementedError


def prepared(data: object, prepare_data: Callable[..., Any], train: bool, global_batch: int | None = None) -> Any:
    """Return this rank's slices of ``data``: what the strategy's ``prepare_data`` returns, for each one of combined loaders.

    See `hocket.hookspecs.StrategyHooks.prepare_data`.

    Raises:
        ValueError: an evaluation or prediction would not see every sample once, or ``global_batch`` is not possible.
    """
    if isinstance(data, CombinedLoaders):
        return data.prepared(prepare_data, train, global_batch)
    return prepare_data(data, train, global_batch)


@functools.cache
def _core() -> tuple[type[DataSource], ...]:
    """Return core's adapters, which are imported when data is first adapted."""
    from hocket.data.sources.base import Batches
    from hocket.data.sources.by_index import ByIndex
    from hocket.data.sources.replay import Replay
    from hocket.data.sources.stateful import Stateful
    from hocket.data.sources.stateful_dataset import StatefulDataset
    from hocket.data.sources.torchdata import TorchdataLoader

    return (ByIndex, TorchdataLoader, Stateful, Batches, StatefulDataset, Replay)


def serves_itself(data: object) -> bool:
    """Whether data is a source, or is served by a registered adapter that is not one of core's."""
    return isinstance(data, Source) or any(cls not in _core() for cls in _serving(data))


def _serving(data: object) -> Iterator[type[DataSource]]:
    """Yield the adapters that serve ``data``. One of a third party that raises is skipped, with a warning."""
    for cls in sorted([*_core(), *_FURTHER], key=lambda adapter: -adapter.priority):
        try:
            serves = cls.serves(data)
        except Exception as error:
            if cls in _core():
                raise
            if cls not in _skipped:
                _skipped.add(cls)
                warn(
                    f"The data adapter {cls.__module__}.{cls.__qualname__} is skipped for {type(data).__name__}: its serves() "
                    f"raised {summarize(error)}. Another adapter reads the data. Upgrade the library that registers it, or do "
                    "not import it."
                )
            continue
        if serves:
            yield cls


#: Adapters that raised, and were warned of.
_skipped: set[type[DataSource]] = set()


def adapt(data: object, slices: Slices | None = None, given: object = None) -> Source:
    """Return the source of ``data`` by the first adapter that serves it; a source is returned as it is.

    Args:
        data: the data to iterate.
        slices: this rank's slices of the batches; None for every batch in full.
        given: the user's data, if ``data`` is a changed copy of it.

    Raises:
        TypeError: no adapter serves the data, or it is a source that would have to be divided.

    Example:
        >>> from hocket.data import adapt
        >>> source = adapt(["first", "second", "third"])
        >>> batches = source.begin()
        >>> next(batches)
        'first'
        >>> position = source.position(1)
        >>> list(source.begin(at=position))
        ['second', 'third']
    """
    if isinstance(data, Source):
        if slices is not None:
            raise WrongType(
                f"{type(data).__name__} is a hocket.data.Source already, which cannot be divided over ranks or into other "
                "global batches. Pass the data that it iterates, and register an adapter for that: see hocket.data.adapter."
            )
        return data
    for cls in _serving(data):
        return cls(data, slices, given)
    raise WrongType(f"{type(data).__name__} cannot be iterated. Give an iterable of batches, such as a DataLoader.")


def as_recorded(source: Source, kind: str) -> Source:
    """Return a source of the same data whose adapter is of the recorded ``kind``, if that one can still serve it.

    A later version of hocket, torch or the data may come with a better adapter, which cannot read the older position.
    """
    from hocket.data.sources.base import DataSource

    if source.kind != kind and isinstance(source, DataSource):
        for cls in _serving(source.data):
            if cls.kind == kind:
                return cls(source.data, source.slices, source.given)
    return source
