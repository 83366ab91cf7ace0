"""Detect the ranks that this process trains with, and start them. torch is only imported when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.launching.environment import Environment, environment, expand_hosts, hint
from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket.launching.errors import WorkerError
    from hocket.launching.processes import cause_of, current, raise_failure, start

__all__ = [
    "Environment",
    "WorkerError",
    "cause_of",
    "current",
    "environment",
    "expand_hosts",
    "hint",
    "raise_failure",
    "start",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "WorkerError": "errors",
        "cause_of": "processes",
        "current": "processes",
        "raise_failure": "processes",
        "start": "processes",
    },
)
