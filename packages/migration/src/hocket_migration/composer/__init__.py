"""Composer's names: change ``from composer import Trainer`` to ``from hocket_migration.composer import Trainer``.

Its Trainer makes a `hocket.Trainer`, which is its attribute ``hocket``. mosaicml itself is not needed.
docs/reference/drop-in-composer.md says what maps to what.
"""

from __future__ import annotations

from hocket.help.lazy import lazy

_MODULES = (
    "algorithms", "callbacks", "core", "devices", "functional", "loggers", "loss", "metrics", "models", "optim", "trainer",
    "utils",
)  # fmt: skip
_PUBLIC = {
    **dict.fromkeys(_MODULES, ""),
    "Algorithm": "core.algorithm",
    "Callback": "core.callback",
    "ComposerModel": "models.base",
    "ComposerTask": "task",
    "DataSpec": "core.data_spec",
    "Engine": "core.engine",
    "Evaluator": "core.evaluator",
    "Event": "core.event",
    "Logger": "loggers.logger",
    "State": "core.state",
    "Time": "core.time",
    "TimeUnit": "core.time",
    "Timestamp": "core.time",
    "Trainer": "trainer",
}

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
