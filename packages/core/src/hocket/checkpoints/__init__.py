"""Checkpoints: folders of safetensors and JSON that are complete or do not exist. Reading them executes nothing.

`hocket.checkpoints.storage` writes and reads trees of data and does not depend on training.
`hocket.checkpoints.content` has the state that a run needs to continue. `hocket.checkpoints.policy` decides when it is written,
`hocket.checkpoints.writing` writes it, and `hocket.checkpoints.retention` then removes older checkpoints.
`hocket.checkpoints.weights` reads other tools' weights. See ``docs/checkpoints.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.checkpoints.component import Check, Component, ContentError, PerRank, Saved
    from hocket.checkpoints.recorded import recorded_algorithms
    from hocket.checkpoints.report import Report
    from hocket.checkpoints.signals import Interrupted
    from hocket.checkpoints.storage import format
    from hocket.checkpoints.storage.errors import CheckpointError, DamagedCheckpointWarning
    from hocket.checkpoints.storage.ranks import Ranks
    from hocket.checkpoints.storage.store import Store
    from hocket.checkpoints.weights import export, load_weights, read_weights

#: Public name -> the module that defines it; "" for a module of that name in `storage`. Modules are imported on first use,
#: because most of reading needs no torch.
_PUBLIC = {
    "Check": "component",
    "CheckpointError": "storage.errors",
    "Component": "component",
    "ContentError": "component",
    "DamagedCheckpointWarning": "storage.errors",
    "Interrupted": "signals",
    "PerRank": "component",
    "Ranks": "storage.ranks",
    "Report": "report",
    "Saved": "component",
    "Store": "storage.store",
    "export": "weights",
    "format": "",
    "load_weights": "weights",
    "read_weights": "weights",
    "recorded_algorithms": "recorded",
}

__all__ = [
    "Check",
    "CheckpointError",
    "Component",
    "ContentError",
    "DamagedCheckpointWarning",
    "Interrupted",
    "PerRank",
    "Ranks",
    "Report",
    "Saved",
    "Store",
    "export",
    "format",
    "load_weights",
    "read_weights",
    "recorded_algorithms",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'; it has {', '.join(__all__)}")
    module = importlib.import_module(f"{__name__}.{_PUBLIC[name] or f'storage.{name}'}")
    globals()[name] = value = getattr(module, name) if _PUBLIC[name] else module
    return value


def __dir__() -> list[str]:
    return __all__
