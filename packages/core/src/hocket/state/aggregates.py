"""Reduce the values that plug-ins and Tasks log: over a logging interval, an epoch or an evaluation set, and over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hocket.help import warn
from hocket.state import log_names, scalars
from hocket.state.accumulators import ACCUMULATORS, REDUCTIONS, Accumulator, Held, Over, Reduce
from hocket.state.metric_adapters import OfMetric, adapted, is_metric
from hocket.state.step import count

if TYPE_CHECKING:
    from hocket.state.state import State

_TENSORS = (Tensor, Parameter)
_ACCUMULATORS: dict[str, type[Accumulator]] = {**ACCUMULATORS, "metric": OfMetric}


class _Scope:
    """The accumulators of an interval, an epoch or an evaluation set, by name."""

    def __init__(self, over: str, reserved: Mapping[str, str] | None = None) -> None:
        self.over = over
        self.accumulators: dict[str, Accumulator] = {}
        #: Further names that are measured otherwise, and by what.
        self.reserved: dict[str, str] = dict(reserved or {})

    @property
    def touched(self) -> dict[str, Accumulator]:
        """The accumulators of names that were logged since the last `clear`."""
        return {name: accumulator for name, accumulator in self.accumulators.items() if accumulator.touched}

    def clear(self) -> None:
        """Begin the next interval or epoch."""
        for accumulator in self.accumulators.values():
            if accumulator.touched:
                accumulator.clear()


class Aggregates:
    """Collect the values of a run, and reduce them.

    A Task holds it as its connection to the run while a Trainer runs; a copied or pickled Task has None in its place.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._interval, self._epoch = _Scope("interval"), _Scope("epoch")
        #: That of the current evaluation set.
        self._set: _Scope | None = None
        #: The accumulators of a call of `log`, by its arguments; emptied where scopes change.
        self._known: dict[Any, tuple[Accumulator, ...]] = {}
        #: Real samples of the current microbatch or batch on this rank; None outside of one, -1 for those of ``state.batch``.
        self.samples: int | None = None
        #: Whether this rank logged a value; and whether all ranks know that some rank did.
        self.used = self.agreed = False
        #: The metrics logged while nothing is collected, by id; None while values are collected.
        self._ignored: dict[int, Any] | None = None
        #: Which of training and evaluation logs a metric object, by id.
        self._owners: dict[int, tuple[Any, str]] = {}
        self._warned: set[str] = set()
        #: Names that the loop measures, and as what.
        self.reserved: dict[str, str] = {}
        #: Names that plug-ins have logged without a reduction.
        self.plain: set[str] = set()

    def __reduce__(self) -> Any:
        return type(None), ()

    def __deepcopy__(self, memo: object) -> None:
        return None

    # --- collect

    def log(
        self,
        values: Mapping[str, Any],
        reduce: Reduce | None,
        over: Over,
        weight: float | Tensor | None,
        of_task: bool = False,
    ) -> None:
        """Add values. ``reduce`` is None for the mean, or the value of a metric; ``of_task`` gives names their label."""
        if self._ignored is not None or (torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1):
            # A backward pass with gradients enabled is a recomputation, by activation checkpointing.
            self._ignore(values)
            return
        samples = self.samples
        if samples is None:
            samples = 1
        elif samples == -1:
            samples = self.samples = count(self._state, self._state.batch).samples
        counted: Any = float(samples) if weight is None else log_names.weight(weight)
        counts = samples and not (type(counted) is float and counted == 0.0)
        for name, value in values.items():
            key = (name, reduce, over if type(over) is str else tuple(over), of_task)
            if (accumulators := self._known.get(key)) is None:
                accumulators = self._known[key] = self._find(name, value, reduce, over, weight, of_task)
            if accumulators[0].reduce == "metric":
                value = self._converted(name, value, accumulators[0])
            elif type(value) in _TENSORS:
                if value.numel() != 1 or value.is_complex() or value.is_meta or value.layout is not torch.strided:
                    raise log_names.not_a_number(name, value)
            elif type(value) is not float:
                value = self._converted(name, value, accumulators[0])
            for accumulator in accumulators:
                accumulator.touched = True
                if counts:
                    accumulator.add(value, counted)

    def _converted(self, name: str, value: object, accumulator: Accumulator) -> Any:
        """Return a number as a float, and a tensor of a subclass or a metric as it is."""
        if isinstance(accumulator, OfMetric):
            if not is_metric(value):
                raise log_names.not_a_metric(name, value)
            owner = "evaluation" if self._set is not None else "training"
            if self._owners.setdefault(id(value), (value, owner))[1] != owner:
                raise log_names.shared_metric(name, value)
            return value
        return scalars.checked(name, value)

    def _find(
        self, name: str, value: Any, reduce: Any, over: Any, weight: Any, of_task: bool
    ) -> tuple[Accumulator, ...]:
        """Return the accumulators that a name is added to, after checking the arguments."""
        scopes = log_names.over(over)
        if reduce is None or (reduce == "last" and is_metric(value)):
            reduce = "metric" if is_metric(value) else "mean"
        log_names.check(name, reduce, weight)
        if reduce == "metric":
            if not is_metric(value):
                raise log_names.not_a_metric(name, value)
            if self._state.strategy.world_size > 1 and not adapted(value).combines:
                raise log_names.not_combined(name, value, self._state.strategy.world_size)
            buffers = adapted(value).buffers() if self._state.strategy.world_size > 1 else []
            if buffers and any(module is value for module in self._state.task.modules()):
                raise log_names.in_buffers(name, value, buffers)
        if reduce == "metric" and len(scopes) > 1 and self._set is None:
            raise log_names.metric_over_both(name)
        if self._set is not None:
            label = self._state.eval_label
            return (self._in(self._set, f"{label}/{name.removeprefix(f'{label}/')}", reduce),)
        self.used = True
        inside = f"train/{name.removeprefix('train/')}"
        places = {
            "interval": (self._interval, inside if of_task else name),
            "epoch": (self._epoch, f"{inside}/epoch" if of_task and len(scopes) > 1 else inside),
        }
        return tuple(self._in(*places[scope], reduce) for scope in scopes)

    def _in(self, scope: _Scope, name: str, reduce: str) -> Accumulator:
        if by := self.reserved.get(name) or scope.reserved.get(name):
            raise log_names.reserved(name, by)
        accumulator = scope.accumulators.get(name)
        other = self._epoch if scope is self._interval else self._interval if scope is self._epoch else None
        if other is not None and name in other.accumulators and other.accumulators[name].touched:
            raise log_names.logged_otherwise(name, f"over={other.over!r}", f"over={scope.over!r}")
        if accumulator is None or (accumulator.reduce != reduce and not accumulator.touched):
            accumulator = scope.accumulators[name] = _ACCUMULATORS[reduce](self._state.device)
            self._known = {}  # which may hold the accumulator that is replaced
        if accumulator.reduce != reduce:
            raise log_names.logged_otherwise(name, f"reduce={accumulator.reduce!r}", f"reduce={reduce!r}")
        return accumulator

    def _ignore(self, values: Mapping[str, Any]) -> None:
        if self._ignored is not None:
            for value in values.values():
                if type(value) not in _TENSORS and is_metric(value):
                    self._ignored[id(value)] = value

    def logs(self, metric: object) -> bool:
        """Whether an object was logged as a metric, whose state is part of what was collected."""
        return id(metric) in self._owners

    # --- when nothing counts

    @property
    def ignoring(self) -> bool:
        """Whether the current pass does not count."""
        return self._ignored is not None

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Collect nothing inside, where values were counted already or do not count, and restore metrics that were logged."""
        outer, self._ignored = self._ignored, {}
        kept = {name: metric.snapshot() for name, metric in self._metrics()}
        try:
            yield
        finally:
            seen, self._ignored = self._ignored, outer
            for accumulator in kept.values():
                if seen.pop(id(accumulator.metric), None) is not None:  # type: ignore[attr-defined]
                    accumulator.restore()
            for metric in seen.values():
                metric.reset()

    def _metrics(self) -> Iterator[tuple[str, Accumulator]]:
        for scope in self._scopes():
            for name, accumulator in scope.accumulators.items():
                if accumulator.reduce == "metric":
                    yield f"{scope.over} {name}", accumulator

    def snapshot(self) -> Mapping[str, Mapping[str, Accumulator]]:
        """Return a copy of what was collected, for `restore`."""
        return {scope.over: {name: a.snapshot() for name, a in scope.accumulators.items()} for scope in self._scopes()}

    def restore(self, kept: Mapping[str, Mapping[str, Accumulator]]) -> None:
        """Forget what was collected since the snapshot."""
        for scope in self._scopes():
            before = kept[scope.over]
            for name, accumulator in scope.accumulators.items():
                if name not in before:
                    accumulator.clear()
            scope.accumulators = {name: accumulator.restore() for name, accumulator in before.items()}
        self._known = {}

    def _scopes(self) -> list[_Scope]:
        return [self._interval, self._epoch, *([] if self._set is None else [self._set])]

    # --- reduce

    @contextmanager
    def evaluation(self, reserved: Mapping[str, str]) -> Iterator[None]:
        """Collect the values of the evaluation set ``state.eval_label`` inside."""
        outer, samples = self._set, self.samples
        self._set, self._known, self.samples = _Scope("evaluation set", reserved), {}, None
        try:
            yield
        finally:
            self._set.clear()
            self._set, self._known, self.samples = outer, {}, samples

    def reserve(self, names: Mapping[str, str]) -> None:
        """Keep names, each with what it is, for the loop. Raises ValueError for one that a plug-in or Task has logged."""
        if names.keys() <= self.reserved.keys():
            return
        for name, by in names.items():
            if name in self.plain or name in self._interval.accumulators or name in self._epoch.accumulators:
                raise log_names.reserved(name, by)
        self.reserved.update(names)
        self._known = {}

    def claim(self, names: Iterable[str]) -> None:
        """Note names that are logged without a reduction. Raises TypeError, and ValueError for a name of the loop."""
        for name in names:
            log_names.check_name(name)
            if by := self.reserved.get(name):
                raise log_names.reserved(name, by)
        self.plain.update(names)

    def reduce_interval(self) -> dict[str, float]:
        """Return the values of the logging interval over all ranks, and begin the next. All ranks call it together."""
        return self._reduce(self._interval, clear=True)

    def reduce_epoch(self, *, clear: bool) -> dict[str, float]:
        """Return the values of the epoch so far over all ranks. All ranks call it together."""
        return self._reduce(self._epoch, clear=clear)

    def mine(self) -> Any:
        """Return what this rank has of the current evaluation set, for `together`; None for nothing."""
        return self._held(self._set) if self._set is not None else None

    def together(self, ranks: Sequence[Any]) -> dict[str, float]:
        """Return the values of the current evaluation set, from `mine` of every rank."""
        assert self._set is not None
        values = self._together(self._set, ranks)
        self._set.clear()
        return values

    def _reduce(self, scope: _Scope, clear: bool) -> dict[str, float]:
        state = self._state
        if state.strategy.world_size == 1:
            if not self.used:
                return {}
            values = self._together(scope, [self._held(scope)])
        elif self.agreed:
            values = self._together(scope, state.bus.all_gather_object(self._held(scope)))
        else:  # values that other ranks do not know of yet wait for the next interval
            return {}
        if clear:
            scope.clear()
        return values

    def _held(self, scope: _Scope) -> Any:
        """Return this rank's data rank and its part of each value, with one transfer per device; None for nothing."""
        touched = scope.touched
        if not touched:
            return None
        numbers = iter(read([tensor for accumulator in touched.values() for tensor in accumulator.tensors()]))
        held = {
            name: (part.reduce, part.held([next(numbers) for _ in part.tensors()])) for name, part in touched.items()
        }
        return self._state.strategy.data_rank, held

    def _together(self, scope: _Scope, ranks: Sequence[Any]) -> dict[str, float]:
        """Return the values, given what each rank has."""
        named_by: dict[str, dict[int, tuple[str, Held]]] = {}
        for rank, theirs in enumerate(ranks):
            for name, held in theirs[1].items() if theirs is not None else ():
                named_by.setdefault(name, {})[rank] = held
        values: dict[str, Any] = {}
        for name, by_rank in named_by.items():
            reduce = next(iter(by_rank.values()))[0]
            same = {rank: held for rank, (how, held) in by_rank.items() if how == reduce}
            if len(same) < len(ranks):
                self._warn(name, scope, reduce, by_rank, len(ranks))
            # Ranks that compute on the same data have the same values, of which one counts.
            parts = list({ranks[rank][0]: held for rank, held in reversed(same.items())}.values())[::-1]
            if reduce != "metric":
                value = ACCUMULATORS[reduce].reduced(parts)
            else:
                accumulator = scope.accumulators.get(name)
                value = None
                if isinstance(accumulator, OfMetric):
                    try:
                        value = accumulator.computed(parts)
                    except Exception as error:
                        error.add_note(
                            f"The metric {type(accumulator.metric).__name__} logged as {name!r} was computed."
                        )
                        raise
                if len(same) < len(ranks):  # a rank without the metric cannot compute it
                    value = next((v for v in self._state.bus.all_gather_object(value) if v is not None), None)
            if value is not None:
                values.update(scalars.named(name, value) if reduce == "metric" else {name: value})
        return scalars.to_floats(values)

    def _warn(self, name: str, scope: _Scope, reduce: str, by_rank: Mapping[int, tuple[str, Held]], world: int) -> None:
        if name in self._warned or self._state.strategy.rank:
            return
        self._warned.add(name)
        warn(log_names.differs(name, scope.over, reduce, {r: h[0] for r, h in by_rank.items()}, world))

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has of the interval and the epoch, as plain data."""
        parts = {}
        for scope in (self._interval, self._epoch):
            parts[scope.over] = {n: {"reduce": part.reduce, **part.state()} for n, part in scope.touched.items()}
        metrics = [id(part.metric) for _, part in self._metrics() if part.touched]  # type: ignore[attr-defined]
        modules = [path for path, part in self._state.task.named_modules() if id(part) in metrics and part.state_dict()]
        return {"data_rank": self._state.strategy.data_rank, "agreed": self.agreed, "modules": modules, **parts}

    def load_state_dicts(self, trees: Sequence[Mapping[str, Any]], modules: Iterable[str] = ()) -> None:
        """Continue from the states of several ranks, which are added up.

        What the weights of the Task have of the same metrics, its ``modules``, is forgotten, so that it counts once.
        """
        for path in set(modules):
            if is_metric(metric := dict(self._state.task.named_modules()).get(path)):
                metric.reset()  # type: ignore[union-attr]
        self._interval, self._epoch = _Scope("interval"), _Scope("epoch")
        self._known = {}
        for tree in trees:
            for scope in (self._interval, self._epoch):
                for name, part in tree[scope.over].items():
                    self.used = True
                    saved = _ACCUMULATORS[part["reduce"]](self._state.device)
                    saved.load(part)
                    saved.touched = True
                    if scope.accumulators.setdefault(name, saved) is not saved:
                        scope.accumulators[name].merge(saved)


def read(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of scalar tensors of one device, with one transfer."""
    return torch.stack(list(tensors)).tolist() if len(tensors) > 1 else [tensor.item() for tensor in tensors]


__all__ = ["REDUCTIONS", "Aggregates", "Over", "Reduce", "is_metric"]
