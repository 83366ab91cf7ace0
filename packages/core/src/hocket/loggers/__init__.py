"""The built-in loggers, each declared by an entry point and imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket.loggers.console import ConsoleLogger
    from hocket.loggers.jsonl import JSONLinesLogger
    from hocket.loggers.memory import MemoryLogger
    from hocket.loggers.progress import ProgressLogger

__all__ = [
    "ConsoleLogger",
    "JSONLinesLogger",
    "MemoryLogger",
    "ProgressLogger",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ConsoleLogger": "console",
        "JSONLinesLogger": "jsonl",
        "MemoryLogger": "memory",
        "ProgressLogger": "progress",
    },
)
