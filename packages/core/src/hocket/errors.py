"""Errors and warnings of checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file and what is wrong with it.

    Names from files may be long, or control a terminal: long messages are shortened in the middle, and unprintable characters
    are escaped.
    """

    def __init__(self, message: str = "") -> None:
        from hocket.safe_files import printable

        super().__init__(printable(message))


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint was skipped because it is damaged."""
