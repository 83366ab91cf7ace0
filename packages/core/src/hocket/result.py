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
        costs: calls and seconds by (plug-in, hook); filled with ``profile_plugins=True``.
        checkpoints: the names of those there are, newest last.
    """

    metrics: Mapping[str, float]
    timestamp: Timestamp
    run_folder: Path
    stop_reason: str = ""
    costs: Mapping[tuple[str, str], Cost] = field(default_factory=dict)
    checkpoints: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Cost:
    """What a plug-in took on one hook."""

    calls: int
    seconds: float
