"""What goes wrong with checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file and what is wrong with it."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint was passed over because it is not what was written."""
