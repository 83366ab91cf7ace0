"""Checkpoints: folders of safetensors and JSON that are whole or do not exist, and that execute nothing when read.

:mod:`~hocket.checkpoints.content` is what a run needs to go on, :mod:`~hocket.checkpoints.policy` when it is written,
:mod:`~hocket.checkpoints.format` writes and reads one, :mod:`~hocket.checkpoints.store` keeps several, here or behind a
URL, :mod:`~hocket.checkpoints.foreign` reads other tools' weights. See ``docs/checkpoints.md``.
"""

from hocket.checkpoints.errors import CheckpointError, DamagedCheckpointWarning

__all__ = ["CheckpointError", "DamagedCheckpointWarning"]
