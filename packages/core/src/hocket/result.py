"""The result of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.help import attributes
from hocket.time import Timestamp


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a fit.

    Args:
        metrics: the latest evaluation results, as ``label/name``.
        timestamp: the completed part of training.
        run_folder: the folder for loggers; it exists if one of them wrote to it.
        stop_reason: the reason given by a plug-in that requested a stop, or empty.
        costs: calls, own seconds and nested seconds by (plug-in, hook); filled with ``profile_plugins=True``.
        checkpoints: the names of the existing checkpoints, newest last.

    Example:
        >>> import hocket, torch
        >>> data = [(torch.ones(8, 4), torch.zeros(8, 4))]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 4), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.0)", train_data=data, eval_data=data,
        ...     duration="3ep", device="cpu",
        ... )
        >>> result = trainer.fit()
        >>> list(result.metrics), result.timestamp.epoch, result.stop_reason
        (['eval/loss'], 3, '')
    """

    metrics: Mapping[str, float]
    timestamp: Timestamp
    run_folder: Path
    stop_reason: str = ""
    costs: Mapping[tuple[str, str], Cost] = field(default_factory=dict)
    checkpoints: Sequence[str] = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(attributes.missing("Result", name, self), name=name, obj=self)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a plug-in on one hook.

    Args:
        calls: number of calls.
        seconds: seconds in its own code. The sum over all plug-ins is their total cost.
        inside: seconds in nested calls: the loop's closure, the wrapped action, other plug-ins.
    """

    calls: int
    seconds: float
    inside: float = 0.0
