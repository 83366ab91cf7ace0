"""Checkpoints: folders of safetensors and JSON that are complete or do not exist. Reading them executes nothing.

`hocket_checkpoints.storage` writes and reads trees of data and does not depend on training.
`hocket_checkpoints.content` has the state that a run needs to continue. `hocket_checkpoints.policy` decides when it is written,
`hocket_checkpoints.writing` writes it, and `hocket_checkpoints.retention` then removes older checkpoints.
`hocket_checkpoints.weights` reads other tools' weights. See ``docs/checkpoints.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket.component import Check, Component, ContentError, PerRank, Saved
    from hocket.distributed.ranks import Ranks
    from hocket.errors import CheckpointError, DamagedCheckpointWarning
    from hocket.training.interruption import Interrupted
    from hocket_checkpoints.policy import Checkpoints
    from hocket_checkpoints.recorded import recorded_algorithms
    from hocket_checkpoints.report import Report
    from hocket_checkpoints.storage import format
    from hocket_checkpoints.storage.store import Store
    from hocket_checkpoints.weights import export, load_weights, read_weights

#: Public name -> the module that defines it, or the package around a module. Modules are imported on first use,
#: because most of reading needs no torch.
_PUBLIC = {
    "Check": "hocket.component",
    "CheckpointError": "hocket.errors",
    "Checkpoints": "policy",
    "Component": "hocket.component",
    "ContentError": "hocket.component",
    "DamagedCheckpointWarning": "hocket.errors",
    "Interrupted": "hocket.training.interruption",
    "PerRank": "hocket.component",
    "Ranks": "hocket.distributed.ranks",
    "Report": "report",
    "Saved": "hocket.component",
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
    "Checkpoints",
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
