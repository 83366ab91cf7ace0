"""Composer's ``composer.loggers``: its interface for custom loggers, and its loggers by their names, which are hocket's."""

from __future__ import annotations

from hocket.help.lazy import lazy

_PUBLIC = {
    "Logger": "logger",
    "LoggerDestination": "logger_destination",
    "InMemoryLogger": "in_memory_logger",
    **dict.fromkeys(
        (
            "CometMLLogger", "ConsoleLogger", "FileLogger", "MLFlowLogger", "MosaicMLLogger", "NeptuneLogger",
            "ProgressBarLogger", "RemoteUploaderDownloader", "SlackLogger", "TensorboardLogger", "WandBLogger",
        ),
        "vendors",
    ),
}  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
