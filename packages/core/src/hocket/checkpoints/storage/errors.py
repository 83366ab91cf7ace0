"""What goes wrong with checkpoints."""

from __future__ import annotations

#: Characters that a message may have: names inside files have any length.
_LONGEST = 10_000


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file and what is wrong with it.

    Names from files may be long, or change a terminal: the message is cut in the middle, unprintable characters are escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text as a terminal may have it: line ends stay, other unprintable characters are escaped, and the middle is cut."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} … {text[-half:]}"
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint was passed over because it is not what was written."""
