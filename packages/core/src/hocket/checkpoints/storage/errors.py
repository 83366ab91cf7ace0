"""Errors and warnings of checkpoints."""

from __future__ import annotations

#: Maximum number of characters of a message: names inside files have any length.
_LONGEST = 10_000


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file and what is wrong with it.

    Names from files may be long, or control a terminal: long messages are shortened in the middle, and unprintable characters
    are escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Return text that is safe for a terminal: unprintable characters but line ends are escaped, and long text is shortened."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} … {text[-half:]}"
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint was skipped because it is damaged."""
