"""Checkpoints: folders of safetensors and JSON that are whole or do not exist, and that execute nothing when read.

:mod:`~hocket.checkpoints.content` is what a run needs to go on, :mod:`~hocket.checkpoints.policy` when it is written,
:mod:`~hocket.checkpoints.format` writes and reads one, :mod:`~hocket.checkpoints.store` keeps several, here or behind a
URL, :mod:`~hocket.checkpoints.foreign` reads other tools' weights. See ``docs/checkpoints.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.checkpoints.component import Check, Component, ContentError, PerRank, Saved
    from hocket.checkpoints.errors import CheckpointError, DamagedCheckpointWarning

#: Public name -> the module that defines it. They are imported when they are first used: reading checkpoints needs no torch.
_PUBLIC = {
    "Check": "component",
    "CheckpointError": "errors",
    "Component": "component",
    "ContentError": "component",
    "DamagedCheckpointWarning": "errors",
    "PerRank": "component",
    "Saved": "component",
}

__all__ = [
    "Check",
    "CheckpointError",
    "Component",
    "ContentError",
    "DamagedCheckpointWarning",
    "PerRank",
    "Saved",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'; it has {', '.join(__all__)}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
