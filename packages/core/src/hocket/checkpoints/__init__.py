"""Checkpoints: folders of safetensors and JSON that are complete or do not exist. Reading them executes nothing.

`hocket.checkpoints.storage` writes and reads trees of data and does not depend on training.
`hocket.checkpoints.content` has the state that a run needs to continue. `hocket.checkpoints.policy` decides when it is written,
`hocket.checkpoints.writing` writes it, and `hocket.checkpoints.retention` then removes older checkpoints.
`hocket.checkpoints.weights` reads other tools' weights. See ``docs/checkpoints.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket.checkpoints.component import Check, Component, ContentError, PerRank, Saved
    from hocket.checkpoints.recorded import recorded_algorithms
    from hocket.checkpoints.report import Report
    from hocket.checkpoints.storage import format
    from hocket.checkpoints.storage.errors import CheckpointError, DamagedCheckpointWarning
    from hocket.checkpoints.storage.ranks import Ranks
    from hocket.checkpoints.storage.store import Store
    from hocket.checkpoints.weights import export, load_weights, read_weights
    from hocket.training.interruption import Interrupted

#: Public name -> the module that defines it, or the package around a module. Modules are imported on first use,
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
    "format": "storage",
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

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
