"""Metrics of one set of data: anything with ``update``, ``compute`` and ``reset``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket.checkpoints.plain import decode, encode
from hocket.data.batches import move
from hocket.data.stateful import has_state
from hocket.state import State
from hocket.training import scalars


class MetricSet:
    """The metrics of one label, over all ranks.

    Metrics that reduce over processes themselves (torchmetrics) are left to it; those with ``merge_state`` (torcheval) are
    merged here. Any other kind would count only its own rank's samples, and is refused where there are several.

    Args:
        label: what their values go by, as ``label/name``.
        metrics: objects by name, copied so that no two sets share one; or a function that returns such a mapping.

    Raises:
        TypeError: one has no update, compute or reset, or cannot be combined over ranks.
    """

    def __init__(
        self, label: str, metrics: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None, state: State
    ) -> None:
        self._label = label
        self._state = state
        given = metrics() if callable(metrics) else copy.deepcopy(dict(metrics or {}))
        given = {**state.task.metrics(label), **given}
        for name, metric in given.items():
            for method in ("update", "compute", "reset"):
                if not callable(getattr(metric, method, None)):
                    raise TypeError(
                        f"Metric '{name}' ({type(metric).__name__}) has no {method}(). Metrics have update, compute and "
                        "reset, such as torchmetrics.classification.MulticlassAccuracy(10)."
                    )
            several = state.strategy.world_size > 1
            if several and not _reduces_itself(metric) and not hasattr(metric, "merge_state"):
                raise TypeError(
                    f"Metric '{name}' ({type(metric).__name__}) cannot be combined over {state.strategy.world_size} "
                    "ranks. Use a torchmetrics metric, or give it merge_state(others)."
                )
            if state.strategy.data_ranks < state.strategy.world_size and _reduces_itself(metric):
                for each in metric.modules():
                    each.process_group = state.strategy.data_group
        self._metrics = {
            name: metric.to(state.device) if hasattr(metric, "to") else metric for name, metric in given.items()
        }
        self._seen = False

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def names(self) -> set[str]:
        """Of the metrics."""
        return set(self._metrics)

    def reset(self) -> None:
        """Forget everything that was seen."""
        for metric in self._metrics.values():
            metric.reset()
        self._seen = False

    def update(self, outputs: Any, batch: Any) -> None:
        """Show one microbatch to every metric; without gradients."""
        self._seen = True
        with torch.no_grad():
            for metric in self._metrics.values():
                self._state.bus.update_metric(self._state, metric, outputs, batch)

    def compute(self) -> dict[str, float]:
        """Values as ``label/name``: numbers, one each for a metric that returns several. Empty if nothing was seen."""
        bus = self._state.bus
        if not self._metrics or not any(seen := bus.all_gather_object(self._seen)):
            return {}
        if not all(seen):
            return self._compute_together()
        values: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            if self._state.strategy.world_size > 1 and not _reduces_itself(metric):
                # One of the ranks that saw the same samples is enough.
                shares = dict(bus.all_gather_object((self._state.strategy.data_rank, metric)))
                first, *others = (seen for _, seen in sorted(shares.items(), key=lambda item: item[0]))
                metric = copy.deepcopy(first)
                metric.merge_state(others)
            values.update(_named(f"{self._label}/{name}", metric.compute()))
        return scalars.to_floats(values)

    def _compute_together(self) -> dict[str, float]:
        """As `compute`, from what all ranks have seen: torchmetrics that keep lists wait for ever for a rank without any."""
        mine = self.state_dict()
        shares = dict(self._state.bus.all_gather_object((self._state.strategy.data_rank, mine)))
        self.load_state_dicts([share for _, share in sorted(shares.items())])
        values: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            with _alone(metric):
                values.update(_named(f"{self._label}/{name}", metric.compute()))
        self.load_state_dicts([mine])
        return scalars.to_floats(values)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What each metric has seen on this rank, as a tree."""
        states = {name: encode(_state_of(metric), f"metric {name}") for name, metric in self._metrics.items()}
        return {"seen": self._seen, "metrics": states}

    def load_state_dicts(self, trees: Sequence[Mapping[str, Any]]) -> None:
        """Undo :meth:`state_dict`, of several ranks: what they have seen is put together here. None: nothing was seen.

        Raises ValueError for other metrics than these.
        """
        self.reset()
        for tree in trees:
            if tree["metrics"].keys() != self._metrics.keys():
                raise ValueError(
                    f"The state of the metrics of '{self._label}' is that of {', '.join(tree['metrics']) or 'none'}, but there "
                    f"are {', '.join(self._metrics) or 'none'}. Give the same {self._label}_metrics= as before."
                )
            if not tree["seen"]:
                continue
            for name, metric in self._metrics.items():
                other = copy.deepcopy(metric) if self._seen else metric
                _restore(other, move(decode(tree["metrics"][name]), self._state.device))
                if self._seen:
                    _merge(metric, other)
            self._seen = True


def _state_of(metric: Any) -> Any:
    """What a metric has added up: of torchmetrics' its states (their ``state_dict`` leaves most out), of others
    ``state_dict()``, or else their attributes."""
    if hasattr(metric, "compute_groups"):
        return {name: _state_of(each) for name, each in metric.items(keep_base=True)}
    if hasattr(metric, "metric_state"):
        return {"updates": metric.update_count, "states": dict(metric.metric_state)}
    return metric.state_dict() if has_state(metric) else dict(vars(metric))


def _restore(metric: Any, state: Any) -> None:
    if hasattr(metric, "compute_groups"):
        # Metrics of a group share their states once they have been updated; those of the first are then everybody's.
        for name, each in metric.items(keep_base=True):
            _restore(each, state[name])
    elif hasattr(metric, "metric_state"):
        metric.reset()
        for name, value in state["states"].items():
            setattr(metric, name, value)
        metric._update_count = state["updates"]
    elif has_state(metric):
        metric.load_state_dict(state)
    else:
        there = vars(metric)
        for name, value in state.items():
            place = there[name].device if isinstance(there.get(name), torch.Tensor) else None
            there[name] = value if place is None else move(value, place)


def _merge(metric: Any, other: Any) -> None:
    if hasattr(metric, "compute_groups"):
        for each, its in zip(metric.values(), other.values(), strict=True):
            each.merge_state(its)
    else:
        metric.merge_state(other if _reduces_itself(metric) else [other])


def _reduces_itself(metric: Any) -> bool:
    """torchmetrics' own do; their ``merge_state`` is another one than torcheval's."""
    return hasattr(metric, "dist_sync_on_step") or hasattr(metric, "compute_groups")  # the latter: a MetricCollection


@contextmanager
def _alone(metric: Any) -> Iterator[None]:
    """Without other processes, for what reduces over them by itself."""
    parts = (
        [each for each in metric.modules() if hasattr(each, "distributed_available_fn")]
        if _reduces_itself(metric)
        else []
    )
    asked = [each.distributed_available_fn for each in parts]
    for each in parts:
        each.distributed_available_fn = _never
    try:
        yield
    finally:
        for each, before in zip(parts, asked, strict=True):
            each.distributed_available_fn = before


def _never() -> bool:
    return False


def _named(name: str, value: Any) -> dict[str, Any]:
    """A number under its name; the elements of a mapping or a vector under ``name/key``."""
    if isinstance(value, Mapping):
        return {key: item for part, inner in value.items() for key, item in _named(f"{name}/{part}", inner).items()}
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() > 1:
        return {f"{name}/{index}": item for index, item in enumerate(value)}
    return {name: value}
