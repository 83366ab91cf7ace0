"""Save, restore and combine the metrics of different libraries, and collect the logged metrics.

Metrics of torchmetrics are recognized by their class, without importing anything. Only this file uses what is private there:
``_update_count``, without which a restored metric warns that ``compute`` was called before ``update``, and ``_reductions``,
since ``merge_state`` refuses some metrics, adds in another order than that of the run, and does not weight means.
"""

from __future__ import annotations

import copy
import copyreg
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hocket.basics.plain_data import decode, encode
from hocket.data.batch_placement import move
from hocket.data.nesting import map_tensors
from hocket.data.stateful import has_state
from hocket.help import warn
from hocket.state.accumulators import Accumulator, Held

if TYPE_CHECKING:
    from hocket.basics.types import Metric


def adapted(metric: Metric) -> MetricAdapter:
    """Return the adapter of a metric."""
    return next(cls for cls in _ADAPTERS if cls.serves(metric))(metric)


def is_metric(obj: object) -> bool:
    """Whether it is an object with ``update``, ``compute`` and ``reset``."""
    return all(callable(getattr(obj, name, None)) for name in ("update", "compute", "reset"))


def copy_of(metric: object) -> Any:
    """Return a copy of a metric, without the hooks that others have on its passes, and without graphs."""
    modules = metric.modules() if isinstance(metric, torch.nn.Module) else ()
    attributes = [_attributes(metric), *map(vars, modules)]
    known: dict[int, Any] = {
        id(value): {}
        for table in attributes
        for name, value in table.items()
        if re.match("_(forward|backward).*_hooks", name)
    }
    known |= {id(leaf): leaf.detach().clone() for leaf in tree_leaves(attributes) if _has_graph(leaf)}
    return copy.deepcopy(metric, known)


class MetricAdapter:
    """The base: any object with ``update``, ``compute`` and ``reset``; with ``merge_state`` (torcheval) for several ranks."""

    #: Whether ``compute`` reduces over processes itself.
    reduces_itself = False

    def __init__(self, metric: Metric) -> None:
        self.metric: Any = metric  # of any library

    @classmethod
    def serves(cls, metric: object) -> bool:
        """Whether the metric is of this library."""
        return True

    @property
    def combines(self) -> bool:
        """Whether it can be combined over ranks."""
        return self.reduces_itself or hasattr(self.metric, "merge_state")

    @property
    def merges(self) -> bool:
        """Whether it can `merge`."""
        return hasattr(self.metric, "merge_state")

    def buffers(self) -> list[str]:
        """Return the buffers in which the metric accumulates, by name: `reset` would change their values."""
        if not isinstance(self.metric, torch.nn.Module):
            return []
        (empty := copy_of(self.metric)).reset()
        reset = dict(empty.named_buffers())
        return [
            name
            for name, buffer in self.metric.named_buffers()
            if name not in reset or not torch.equal(buffer, reset[name])
        ]

    def to(self, device: torch.device) -> None:
        """Move it to a device, if it has ``to``."""
        if hasattr(self.metric, "to"):
            self.metric = self.metric.to(device)

    def reduce_within(self, group: object) -> None:
        """Have ``compute`` reduce over the ranks of a process group only, if it reduces itself."""

    def detach(self) -> None:
        """Free the graphs that its attributes hold."""
        for name, value in _attributes(self.metric).items():
            if any(map(_has_graph, tree_leaves(value))):
                setattr(self.metric, name, map_tensors(Tensor.detach, value))

    def state(self) -> Any:
        """Return its sums: ``state_dict()``, or else its attributes."""
        return self.metric.state_dict() if has_state(self.metric) else _attributes(self.metric)

    def restore(self, state: Any) -> None:
        """Undo :meth:`state`."""
        if has_state(self.metric):
            self.metric.load_state_dict(state)
            return
        attributes = _attributes(self.metric)
        for name, value in state.items():
            before = attributes.get(name)
            setattr(self.metric, name, move(value, before.device) if isinstance(before, Tensor) else value)

    def merge(self, others: Sequence[Any]) -> None:
        """Add the sums of other metrics of its kind, which saw later batches."""
        self.metric.merge_state(list(others))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have ``compute`` not reduce over processes inside."""
        yield


class Torchmetrics(MetricAdapter):
    """Adapt a metric of torchmetrics and its child metrics. Their ``state_dict`` omits most states."""

    reduces_itself = True

    @classmethod
    def serves(cls, metric: object) -> bool:
        """See :meth:`MetricAdapter.serves`."""
        return isinstance(metric, _classes("Metric"))

    def buffers(self) -> list[str]:
        """See :meth:`MetricAdapter.buffers`. torchmetrics keeps states in attributes."""
        return []

    def detach(self) -> None:
        """See :meth:`MetricAdapter.detach`. Its ``update`` keeps none."""

    @property
    def merges(self) -> bool:
        """Whether torchmetrics says how the states of two of them are combined."""
        return all(
            _own_merge(part) or all(_name(how) in _COMBINED for how in _reductions(part).values())
            for part in self._parts(self.metric).values()
        )

    def reduce_within(self, group: object) -> None:
        """See :meth:`MetricAdapter.reduce_within`."""
        for module in self.metric.modules():
            module.process_group = group

    def state(self) -> Any:
        """See :meth:`MetricAdapter.state`."""
        (_, whole), *parts = ((name, _state(part)) for name, part in self._parts(self.metric).items())
        return whole | {"parts": dict(parts)} if parts else whole

    def restore(self, state: Any) -> None:
        """See :meth:`MetricAdapter.restore`."""
        self.metric.reset()
        parts = self._parts(self.metric)
        for name, saved in {"": state, **state.get("parts", {})}.items():
            for attribute, value in saved["states"].items():
                setattr(parts[name], attribute, value)
            parts[name]._update_count = saved["updates"]

    def merge(self, others: Sequence[Any]) -> None:
        """See :meth:`MetricAdapter.merge`."""
        for other in others:
            its = self._parts(other)
            for name, part in self._parts(self.metric).items():
                _merge(part, its[name])

    @staticmethod
    def _parts(metric: Any) -> dict[str, Any]:
        """Return the metric, named "", and its child metrics by name, as a wrapper or an expression has them."""
        return {name: part for name, part in metric.named_modules() if isinstance(part, _classes("Metric"))}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See :meth:`MetricAdapter.alone`."""
        parts = [part for part in self.metric.modules() if hasattr(part, "distributed_available_fn")]
        before = [part.distributed_available_fn for part in parts]
        for part in parts:
            part.distributed_available_fn = _never
        try:
            yield
        finally:
            for part, function in zip(parts, before, strict=True):
                part.distributed_available_fn = function


class Collection(Torchmetrics):
    """A MetricCollection. Metrics of a group share their states once they have been updated; then the first one's are used."""

    @classmethod
    def serves(cls, metric: object) -> bool:
        """See :meth:`MetricAdapter.serves`."""
        return isinstance(metric, _classes("MetricCollection"))

    def state(self) -> Any:
        """See :meth:`MetricAdapter.state`."""
        return {name: adapted(metric).state() for name, metric in self.metric.items(keep_base=True)}

    def restore(self, state: Any) -> None:
        """See :meth:`MetricAdapter.restore`."""
        for name, metric in self.metric.items(keep_base=True):
            adapted(metric).restore(state[name])

    @property
    def merges(self) -> bool:
        """See :meth:`MetricAdapter.merges`."""
        return all(adapted(metric).merges for metric in self.metric.values())

    def merge(self, others: Sequence[Any]) -> None:
        """See :meth:`MetricAdapter.merge`."""
        for other in others:
            for metric, its in zip(self.metric.values(), other.values(), strict=True):
                adapted(metric).merge([its])


_ADAPTERS: tuple[type[MetricAdapter], ...] = (Collection, Torchmetrics, MetricAdapter)


#: The reductions of torchmetrics: how to combine a state with the one of later batches, and the numbers of updates.
_COMBINED: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "dim_zero_sum": lambda first, later, n, m: first + later,
    "dim_zero_mean": lambda first, later, n, m: (first * n + later * m) / max(n + m, 1),
    "dim_zero_max": lambda first, later, n, m: torch.maximum(first, later),
    "dim_zero_min": lambda first, later, n, m: torch.minimum(first, later),
    "dim_zero_cat": lambda first, later, n, m: [*_listed(first), *_listed(later)],
}


def _state(metric: Any) -> dict[str, Any]:
    return {"updates": metric.update_count, "states": {name: getattr(metric, name) for name in _reductions(metric)}}


def _reductions(metric: Any) -> dict[str, Any]:
    """Return how its states are reduced, by name, without those of a metric inside that a wrapper answers for."""
    return {name: how for name, how in metric._reductions.items() if name in vars(metric)}


def _merge(metric: Any, later: Any) -> None:
    first, second = metric.update_count, later.update_count
    if _own_merge(metric):
        metric.merge_state(later)
    else:
        for attribute, how in _reductions(metric).items():
            combine = _COMBINED[_name(how)]
            setattr(metric, attribute, combine(getattr(metric, attribute), getattr(later, attribute), first, second))
    metric._update_count = first + second


def _own_merge(metric: object) -> bool:
    inherited = (getattr(kind, "merge_state", None) for kind in _classes("Metric"))
    return getattr(type(metric), "merge_state", None) not in (None, *inherited)


def _name(function: object) -> str:
    return getattr(function, "__name__", "")


def _listed(values: object) -> list[Any]:
    return list(values) if isinstance(values, list) else [values]


def _classes(name: str) -> tuple[type, ...]:
    """Return torchmetrics' class of a name, if it was imported; else there can be no metric of it."""
    cls = getattr(sys.modules.get("torchmetrics"), name, None)
    return () if cls is None else (cls,)


def _attributes(obj: object) -> dict[str, Any]:
    """Return the attributes of an object, those in ``__slots__`` too."""
    slots = copyreg._slotnames(type(obj))  # type: ignore[attr-defined]
    return {name: getattr(obj, name) for name in slots if hasattr(obj, name)} | getattr(obj, "__dict__", {})


def _has_graph(value: object) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _never() -> bool:
    return False


class OfMetric(Accumulator):
    """A metric object that the user updates: computed over all ranks and reset at the end of the interval."""

    reduce = "metric"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._metric: MetricAdapter | None = None
        #: States of a resumed run, which the metric does not have yet; and that of the metric when a snapshot was taken.
        self._saved: list[Any] = []
        self._kept: Any = None

    @property
    def metric(self) -> Any:
        """The metric object, or None before it was logged."""
        return None if self._metric is None else self._metric.metric

    def add(self, value: Any, weight: float | Tensor) -> None:
        """Remember the metric. States of a resumed run are merged into it."""
        self.count = 1
        if self._metric is not None and self.metric is value:
            self._metric.detach()
            return
        self._metric = adapted(value)
        self._metric.detach()
        if self._saved and not self._metric.merges:
            warn(
                f"The logged metric {type(value).__name__} cannot add what another one saw, so what it saw before the "
                "checkpoint is lost, and this interval begins where the run was resumed. Give it merge_state(others), or use a "
                "torchmetrics metric whose states have a dist_reduce_fx."
            )
            self._saved = []
        for state in self._saved:
            earlier = adapted(copy_of(value))
            earlier.metric.reset()
            earlier.restore(move(decode(state), self._device))
            # In the order of the run: what was seen before, then what this run has seen.
            earlier.merge([copy_of(value)])
            self._metric.restore(earlier.state())
        self._saved = []

    def snapshot(self) -> Accumulator:
        copied = copy.copy(self)
        copied._saved = list(self._saved)
        if self._metric is not None:
            copied._kept = map_tensors(Tensor.clone, self._metric.state())
        return copied

    def restore(self) -> Accumulator:
        """Give the metric the state that it had."""
        if self._metric is not None:
            self._metric.restore(self._kept)
            self._kept = None
        return self

    def clear(self) -> None:
        """Reset the metric."""
        if self._metric is not None:
            self._metric.metric.reset()
        super().clear()

    def held(self, values: Sequence[float]) -> Held:
        """Return its state, and 1 or 0. A metric that was not logged since the run was resumed has one saved state at most."""
        if self._metric is None:
            return self._saved[0] if self._saved else None, len(self._saved)
        return encode(map_tensors(_to_host, self._metric.state()), "a logged metric"), 1

    def state(self) -> dict[str, Any]:
        return {"states": self._saved if self._metric is None else [self.held([])[0]]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the metric is logged."""
        self._saved = list(state["states"])

    def merge(self, other: Accumulator) -> None:
        self._saved += other.state()["states"]

    def computed(self, ranks: Sequence[Held]) -> Any:
        """Return the metric's value over ranks, or None for no state. Its own state does not change."""
        states = [state for state, count in ranks if count]
        if not states or self._metric is None:
            return None
        if len(states) == 1:
            with self._metric.alone():
                return self.metric.compute()
        whole, *others = (adapted(copy_of(self.metric)) for _ in states)
        for copied, state in zip((whole, *others), states, strict=True):
            copied.restore(move(decode(state), self._device))
        whole.merge([later.metric for later in others])
        with whole.alone():
            return whole.metric.compute()


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
