"""Composer's evaluation sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import hocket
from hocket.errors import WrongValue
from hocket_migration.composer.core.data_spec import DataSpec, Parts, ensure_data_spec
from hocket_migration.composer.core.time import Time


class Evaluator:
    """An evaluation set with a label, metrics and an interval.

    Args:
        label: the name of the set.
        dataloader: any iterable of batches, a `DataSpec`, or its arguments as a dict.
        metric_names: regular expressions, of which a metric of the model has to contain one, in any case; None for all metrics.
        subset_num_batches: evaluate on the first so many batches; None for the Trainer's ``eval_subset_num_batches``.
        eval_interval: a number of epochs, a text, a Time, or a function of state and event; None for the Trainer's.
        device_eval_microbatch_size: samples per forward pass; None for those of a batch.

    Raises:
        ValueError: ``device_eval_microbatch_size`` is ``"auto"`` or not a whole number.

    Example:
        >>> import torch
        >>> from hocket_migration.composer import Evaluator
        >>> evaluator = Evaluator(label="test", dataloader=[(torch.ones(4, 2), torch.zeros(4))], metric_names=["Accuracy"])
    """

    def __init__(
        self,
        *,
        label: str,
        dataloader: DataSpec | Iterable[Any] | dict[str, Any],
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: int | str | Time | Callable[[Any, Any], bool] | None = None,
        device_eval_microbatch_size: int | str | None = None,
    ) -> None:
        size = device_eval_microbatch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise WrongValue(
                f"device_eval_microbatch_size={size!r}: hocket does not search it. Give a number of samples, or None for the "
                "batches of the loader."
            )
        self.label = label
        self.dataloader = ensure_data_spec(dataloader)
        self.metric_names = None if metric_names is None else list(metric_names)
        self.subset_num_batches = subset_num_batches
        self.eval_interval = eval_interval
        self.device_eval_microbatch_size = size

    def chosen(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the model's metrics that this set is evaluated with."""
        names = self.metric_names
        if names is None:
            return dict(metrics)
        return {key: value for key, value in metrics.items() if any(re.search(each, key, re.I) for each in names)}

    def eval_set(self, every: str | None, limit: int | None) -> hocket.EvalSet:
        """Return hocket's evaluation set. ``every`` and ``limit`` are the Trainer's."""
        subset = self.subset_num_batches
        limit = limit if subset is None else None if subset < 0 else subset
        data: Any = self.dataloader.dataloader
        if self.dataloader.limit(limit) is not None or self.device_eval_microbatch_size is not None:
            data = Parts(self.dataloader, limit, self.device_eval_microbatch_size)
        return hocket.EvalSet(data, every=interval(self.eval_interval) if self.eval_interval is not None else every)


def ensure_evaluator(evaluator: Any, default_metric_names: Sequence[str] | None = None) -> Evaluator:
    """Return an Evaluator of an Evaluator, or of data, then labelled ``"eval"``."""
    if isinstance(evaluator, Evaluator):
        return evaluator
    return Evaluator(label="eval", dataloader=evaluator, metric_names=default_metric_names)


def interval(given: Any, name: str = "eval_interval") -> str:
    """Return hocket's interval: a number is one of epochs, and 0 or a function is never, for the Trainer asks the function."""
    if callable(given):
        return "0ba"
    time = Time.from_input(given, "ep")
    if time.unit == "iter":
        raise WrongValue(
            f"{name}='{time}' is in iterations, which hocket does not have. Write batches ('ba') or epochs ('ep')."
        )
    return str(time) if time.value else "0ba"
