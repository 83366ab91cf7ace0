"""The built-in loggers, each declared by an entry point and imported on first use; some are of another part of hocket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket.loggers.console import ConsoleLogger as ConsoleLogger
    from hocket.loggers.memory import MemoryLogger as MemoryLogger
    from hocket_loggers.jsonl import JSONLinesLogger as JSONLinesLogger
    from hocket_loggers.progress import ProgressLogger as ProgressLogger

__getattr__, __dir__ = lazy(__name__)
