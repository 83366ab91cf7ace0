"""Save, restore and combine over ranks the metrics of different libraries.

Metrics of torchmetrics are recognized by their class, without importing anything. Only this file writes their private
``_update_count``: without it a restored metric warns that ``compute`` was called before ``update``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket.data.nesting import move
from hocket.data.stateful import has_state


def adapted(metric: Any) -> MetricAdapter:
    """Return the adapter of a metric."""
    return next(cls for cls in _ADAPTERS if cls.serves(metric))(metric)


class MetricAdapter:
    """The base: any object with ``update``, ``compute`` and ``reset``; with ``merge_state`` (torcheval) for several ranks."""

    #: Whether ``compute`` reduces over processes itself.
    reduces_itself = False

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    @classmethod
    def serves(cls, metric: Any) -> bool:
        """Whether the metric is of this library."""
        return True

    @property
    def combines(self) -> bool:
        """Whether it can be combined over ranks."""
        return self.reduces_itself or hasattr(self.metric, "merge_state")

    def to(self, device: torch.device) -> None:
        """Move it to a device, if it has ``to``."""
        if hasattr(self.metric, "to"):
            self.metric = self.metric.to(device)

    def reduce_within(self, group: Any) -> None:
        """Have ``compute`` reduce over the ranks of a process group only, if it reduces itself."""

    def state(self) -> Any:
        """Return its sums: ``state_dict()``, or else its attributes."""
        return self.metric.state_dict() if has_state(self.metric) else dict(vars(self.metric))

    def restore(self, state: Any) -> None:
        """Undo :meth:`state`."""
        if has_state(self.metric):
            self.metric.load_state_dict(state)
            return
        attributes = vars(self.metric)
        for name, value in state.items():
            before = attributes.get(name)
            attributes[name] = move(value, before.device) if isinstance(before, torch.Tensor) else value

    def merge(self, others: Sequence[Any]) -> None:
        """Add the sums of other metrics of its kind."""
        self.metric.merge_state(list(others))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have ``compute`` not reduce over processes inside."""
        yield


class Torchmetrics(MetricAdapter):
    """A metric of torchmetrics. Its ``state_dict`` skips most states, and its ``merge_state`` takes one metric at a time."""

    reduces_itself = True

    @classmethod
    def serves(cls, metric: Any) -> bool:
        """See :meth:`MetricAdapter.serves`."""
        return isinstance(metric, _classes("Metric"))

    def reduce_within(self, group: Any) -> None:
        """See :meth:`MetricAdapter.reduce_within`."""
        for each in self.metric.modules():
            each.process_group = group

    def state(self) -> Any:
        """See :meth:`MetricAdapter.state`."""
        return {"updates": self.metric.update_count, "states": dict(self.metric.metric_state)}

    def restore(self, state: Any) -> None:
        """See :meth:`MetricAdapter.restore`."""
        self.metric.reset()
        for name, value in state["states"].items():
            setattr(self.metric, name, value)
        self.metric._update_count = state["updates"]

    def merge(self, others: Sequence[Any]) -> None:
        """See :meth:`MetricAdapter.merge`."""
        for other in others:
            self.metric.merge_state(other)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See :meth:`MetricAdapter.alone`."""
        parts = [each for each in self.metric.modules() if hasattr(each, "distributed_available_fn")]
        before = [each.distributed_available_fn for each in parts]
        for each in parts:
            each.distributed_available_fn = _never
        try:
            yield
        finally:
            for each, function in zip(parts, before, strict=True):
                each.distributed_available_fn = function


class Collection(Torchmetrics):
    """A MetricCollection. Metrics of a group share their states once they have been updated; then the first one's are used."""

    @classmethod
    def serves(cls, metric: Any) -> bool:
        """See :meth:`MetricAdapter.serves`."""
        return isinstance(metric, _classes("MetricCollection"))

    def state(self) -> Any:
        """See :meth:`MetricAdapter.state`."""
        return {name: adapted(each).state() for name, each in self.metric.items(keep_base=True)}

    def restore(self, state: Any) -> None:
        """See :meth:`MetricAdapter.restore`."""
        for name, each in self.metric.items(keep_base=True):
            adapted(each).restore(state[name])

    def merge(self, others: Sequence[Any]) -> None:
        """See :meth:`MetricAdapter.merge`."""
        for other in others:
            for each, its in zip(self.metric.values(), other.values(), strict=True):
                each.merge_state(its)


_ADAPTERS: tuple[type[MetricAdapter], ...] = (Collection, Torchmetrics, MetricAdapter)


def _classes(name: str) -> tuple[type, ...]:
    """Return torchmetrics' class of a name, if it was imported; else there can be no metric of it."""
    found = getattr(sys.modules.get("torchmetrics"), name, None)
    return () if found is None else (found,)


def _never() -> bool:
    return False
