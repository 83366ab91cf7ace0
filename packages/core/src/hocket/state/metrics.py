"""The metrics of one data set: any objects with ``update``, ``compute`` and ``reset``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hocket.basics.plain_data import decode, encode
from hocket.basics.short_repr import short
from hocket.data.batch_placement import move
from hocket.errors import WrongType, WrongValue
from hocket.hookspecs.strategies import replicas
from hocket.state import conversions, scalars
from hocket.state.metric_adapters import adapted, copy_of
from hocket.state.simple_metrics import Accuracy
from hocket.state.state import State
from hocket.state.task import SupervisedTask, Task

if TYPE_CHECKING:
    from hocket.basics.types import Batch


class MetricSet:
    """The metrics of one label, over all ranks.

    Metrics that reduce over processes themselves (torchmetrics) do so; those with ``merge_state`` (torcheval) are merged
    here. Any other metric would count only the samples of its own rank, and is refused if there are several ranks.

    Args:
        label: the prefix of their values, as in ``label/name``.
        metrics: objects by name, copied so that no two sets have one object in common; or a function that returns such a
            mapping.

    Raises:
        TypeError: a metric has no update, compute or reset, or cannot be combined over ranks.
        ValueError: a metric is named as the loss.
    """

    def __init__(
        self, label: str, metrics: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None, state: State
    ) -> None:
        self._label = label
        self._state = state
        given = _made(metrics(), "metrics=") if callable(metrics) else copy.deepcopy(dict(metrics or {}))
        own = _made(state.task.metrics(label), f"metrics({label!r}) of {type(state.task).__name__}")
        given = {**own, **given}
        # A task with its own eval_forward may have no loss in evaluations.
        if "loss" in given and (label == "train" or type(state.task).eval_forward is Task.eval_forward):
            raise WrongValue(named_loss(label))
        for name, metric in given.items():
            for method in ("update", "compute", "reset"):
                if not callable(getattr(metric, method, None)):
                    if inspect.isroutine(metric):
                        raise WrongType(
                            f"Metric '{name}' is a function, and values of batches do not add up to one of the set in general. "
                            "Write «metrics='accuracy'», a metric of torchmetrics, or a class with update(outputs, targets), "
                            "compute() and reset()."
                        )
                    raise WrongType(
                        f"Metric '{name}' ({type(metric).__name__}) has no {method}(). Metrics have update, compute and "
                        "reset, such as torchmetrics.classification.MulticlassAccuracy(10)."
                    )
            if isinstance(metric, Accuracy) and isinstance(state.task, SupervisedTask):
                metric.follow(state.task.loss_function)
        self._metrics = {name: adapted(metric) for name, metric in given.items()}
        strategy = state.strategy
        for name, adapter in self._metrics.items():
            if strategy.world_size > 1 and not adapter.combines:
                raise WrongType(
                    f"Metric '{name}' ({type(adapter.metric).__name__}) cannot be combined over {strategy.world_size} "
                    "ranks. Use a torchmetrics metric, or give it merge_state(others)."
                )
            if replicas(strategy) > 1:
                adapter.reduce_within(strategy.data_group)
            adapter.to(state.device)
        self._seen = False

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def objects(self) -> list[Any]:
        """The metrics as they were given; their state is that of an epoch or an evaluation."""
        return [adapter.metric for adapter in self._metrics.values()]

    @property
    def names(self) -> set[str]:
        """The names of the metrics."""
        return set(self._metrics)

    @property
    def reserved(self) -> dict[str, str]:
        """The names of the values, and what measures them, for the message about another value of that name."""
        return {f"{self._label}/{name}": f"a metric of '{self._label}'" for name in self._metrics}

    def reset(self) -> None:
        """Forget everything that was seen."""
        for adapter in self._metrics.values():
            adapter.metric.reset()
        self._seen = False

    def update(self, outputs: object, batch: Batch) -> None:
        """Update every metric with one microbatch, without gradients."""
        self._seen = True
        with torch.no_grad():
            for name, adapter in self._metrics.items():
                try:
                    self._state.bus.update_metric(self._state, adapter.metric, outputs, batch)
                except Exception as error:
                    from hocket.help import failures  # only needed for error messages

                    failures.explain(error, "metric", name, adapter.metric, outputs, batch)
                    raise

    def compute(self) -> dict[str, float]:
        """Return the values as ``label/name``, several for a metric that returns several. Empty without any update."""
        bus = self._state.bus
        if not self._metrics or not any(seen := bus.all_gather_object(self._seen)):
            return {}
        if not all(seen):
            return self._compute_together()
        values: dict[str, Any] = {}
        for name, adapter in self._metrics.items():
            if self._state.strategy.world_size > 1 and not adapter.reduces_itself:
                # Of the ranks that saw the same samples, only one counts.
                slices = dict(bus.all_gather_object((self._state.strategy.data_rank, adapter.metric)))
                first, *others = (seen for _, seen in sorted(slices.items(), key=lambda item: item[0]))
                adapter = adapted(copy_of(first))
                adapter.merge(others)
            values.update(scalars.named(f"{self._label}/{name}", adapter.metric.compute()))
        return self._floats(values)

    def _compute_together(self) -> dict[str, float]:
        """Compute from the sums of all ranks: torchmetrics with list states would wait forever for a rank without updates."""
        mine = self.state_dict()
        slices = dict(self._state.bus.all_gather_object((self._state.strategy.data_rank, mine)))
        self.load_state_dicts([seen for _, seen in sorted(slices.items())])
        values: dict[str, Any] = {}
        for name, adapter in self._metrics.items():
            with adapter.alone():
                values.update(scalars.named(f"{self._label}/{name}", adapter.metric.compute()))
        self.load_state_dicts([mine])
        return self._floats(values)

    def _floats(self, values: dict[str, Any]) -> dict[str, float]:
        # A metric may return several values, whose names are known only now.
        self._state.aggregates.reserve(dict.fromkeys(values, f"a metric of '{self._label}'"))
        return scalars.to_floats(values)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what each metric has seen on this rank, as a tree."""
        states = {name: encode(adapter.state(), f"metric {name}") for name, adapter in self._metrics.items()}
        return {"seen": self._seen, "metrics": states}

    def misfit(self, tree: Mapping[str, Any]) -> str:
        """Return how the metrics of a saved state differ from these, and what to type; empty if they have the same names."""
        if tree["metrics"].keys() == self._metrics.keys():
            return ""
        return (
            f"The state of the metrics of '{self._label}' is that of {', '.join(tree['metrics']) or 'none'}, but there "
            f"are {', '.join(self._metrics) or 'none'}. Give the same {self._label}_metrics= as before."
        )

    def load_state_dicts(self, trees: Sequence[Mapping[str, Any]]) -> None:
        """Undo :meth:`state_dict`: merge the states of several ranks into this one. An empty sequence resets the metrics.

        Raises ValueError for the state of other metrics.
        """
        self.reset()
        for tree in trees:
            if misfit := self.misfit(tree):
                raise WrongValue(misfit)
            if not tree["seen"]:
                continue
            for name, adapter in self._metrics.items():
                other = adapted(copy_of(adapter.metric)) if self._seen else adapter
                other.restore(move(decode(tree["metrics"][name]), self._state.device))
                if self._seen:
                    adapter.merge([other.metric])
            self._seen = True


def _made(returned: object, function: str) -> Mapping[str, Any]:
    """Return metrics by name, from what a function returned. Raises TypeError or ValueError for what are no metrics."""
    try:
        metrics = conversions.metrics(returned)
        if isinstance(metrics, Mapping):
            return metrics
        raise WrongType(f"{function} returned {short(returned)}. Return metrics by name, {{}} for none.")
    except (TypeError, ValueError) as error:
        error.add_note(f"Returned by {function}, which may return {{'accuracy': MyMetric()}}, names, or {{}} for none.")
        raise


def named_loss(label: str) -> str:
    """Return what to say of a metric that is named as the loss."""
    return (
        f"A metric is named 'loss', and {label}/loss is the loss of the task. Give the metric another name, such as "
        "'mean_loss'."
    )
