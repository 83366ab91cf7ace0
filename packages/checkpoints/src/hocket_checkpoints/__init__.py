"""Checkpoints: folders of safetensors and JSON that are complete or do not exist. Reading them executes nothing.

`hocket_checkpoints.storage` writes and reads trees of data and does not depend on training.
`hocket_checkpoints.content` has the state that a run needs to continue. `hocket_checkpoints.periodic_saving` decides when it is
written, `hocket_checkpoints.writing` writes it, and `hocket_checkpoints.retention` then removes older checkpoints.
`hocket_checkpoints.weight_files` reads other tools' weights, and `hocket_checkpoints.weights` loads them.
See ``docs/reference/checkpoints.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket.basics.control_c import Interrupted as Interrupted
    from hocket.errors import CheckpointError as CheckpointError, DamagedCheckpointWarning as DamagedCheckpointWarning
    from hocket.state.component import (
        Check as Check,
        Component as Component,
        ContentError as ContentError,
        PerRank as PerRank,
        Saved as Saved,
    )
    from hocket.state.ranks import Ranks as Ranks
    from hocket_checkpoints.algorithm_records import recorded_algorithms as recorded_algorithms
    from hocket_checkpoints.periodic_saving import Checkpoints as Checkpoints
    from hocket_checkpoints.storage import format as format
    from hocket_checkpoints.storage.store import Store as Store
    from hocket_checkpoints.weight_differences import Report as Report
    from hocket_checkpoints.weight_files import read_weights as read_weights
    from hocket_checkpoints.weights import export as export, load_weights as load_weights

__getattr__, __dir__ = lazy(__name__)
