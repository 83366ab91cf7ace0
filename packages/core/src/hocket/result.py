"""What a fit came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hocket.time import Timestamp


@dataclass(frozen=True, slots=True)
class Result:
    """What a fit came to."""

    #: The latest value of everything that was evaluated, as ``label/name``.
    metrics: Mapping[str, float]
    #: How much of training is completed.
    timestamp: Timestamp
    #: Where loggers wrote; exists if one did.
    run_folder: Path
    #: Why a plug-in asked to stop, or empty.
    stop_reason: str = ""
    #: Seconds and calls by (plug-in, hook); filled with ``profile_plugins=True``.
    costs: Mapping[tuple[str, str], Cost] = field(default_factory=dict)
    #: The names of the checkpoints there are, newest last.
    checkpoints: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Cost:
    """What a plug-in took on one hook."""

    calls: int
    seconds: float
