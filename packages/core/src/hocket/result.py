"""What a fit came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hocket.time import Timestamp


@dataclass(frozen=True, slots=True)
class Result:
    """What a fit came to.

    Args:
        metrics: the latest value of everything that was evaluated, as ``label/name``.
        timestamp: how much of training is completed.
        run_folder: where loggers wrote; exists if one did.
        stop_reason: why a plug-in asked to stop, or empty.
        costs: calls, own seconds and seconds inside by (plug-in, hook); filled with ``profile_plugins=True``.
        checkpoints: the names of those there are, newest last.

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


@dataclass(frozen=True, slots=True)
class Cost:
    """What a plug-in took on one hook.

    Args:
        calls: how often it was called.
        seconds: in its own code. The sum over all plug-ins is what they cost together.
        inside: in what it called or wrapped: the loop's closure, the wrapped action, other plug-ins.
    """

    calls: int
    seconds: float
    inside: float = 0.0
