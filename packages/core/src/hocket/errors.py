"""Errors that explain themselves to the user, and what they say in another spelling than Python's.

The text of such an error says what was given, what is allowed and what to write. Marks around a setting that it names make that
data: ``raise WrongValue(f"«seed={seed!r}» is not an int. Write «seed=17».")``. In Python the text is without the marks, and a
configuration renders the same error with ``seed: 17``. A mark may have another spelling for configurations, after a bar:
``«trainer.fit()¦`hocket train`»``, ``«model=Net()¦model='module:Net'»``; nothing after the bar omits the words. Constants of
Python, and tuples, lists and dicts that begin with a text, may have marks: ``«None»``, ``«('norm', 1.0)»``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_MARK = re.compile(r"«([^«»]*)»")


class Setting(NamedTuple):
    """An argument that an error names, and its value in Python; one is empty where only the other is meant."""

    name: str
    value: str


def rendered(marked: str, spelled: Callable[[Setting], str] | None = None) -> str:
    """Return a text without its marks: as in Python, or for a configuration, where ``spelled`` returns text for a setting."""

    def text(mark: re.Match[str]) -> str:
        python, other = _spellings(mark)
        if spelled is None:
            return python
        return spelled(other) if isinstance(other, Setting) else other

    return _MARK.sub(text, marked)


def _spellings(mark: re.Match[str]) -> tuple[str, Setting | str]:
    """Return what a mark says in Python, and in a configuration. Other text in such quotation marks stays as it is."""
    python, bar, other = mark[1].partition("¦")
    name, equals, value = (other if bar else python).partition("=")
    if equals and name.isidentifier():
        return python, Setting(name, value)
    if python in ("None", "True", "False") or python.startswith(("('", "['", "{'")):
        return python, Setting("", python)
    return (python, other) if bar else (mark[0], mark[0])


class Mistake(Exception):
    """Base class of errors of the user's, whose message suffices: no traceback is shown for them.

    Attributes:
        marked: the text with its marks, as it was raised.
        settings: the settings that it names, in their order: first what was given, then what to write.
        about: the name of the argument that it is about: by default the first word of the text, or setting in it.
    """

    marked = ""
    _about: str | None = None

    def __init__(self, message: str = "", *, about: str | None = None, **options: object) -> None:
        self.marked = message
        self._about = about
        super().__init__(rendered(message), **options)

    @property
    def settings(self) -> tuple[Setting, ...]:
        others = [_spellings(mark)[1] for mark in _MARK.finditer(self.marked)]
        return tuple(other for other in others if isinstance(other, Setting) and other.name)

    @property
    def about(self) -> str:
        first = self.marked.partition(" ")[0].partition("[")[0]
        return self._about or (first if first.isidentifier() else next((each.name for each in self.settings), ""))


class WrongValue(Mistake, ValueError):
    """An argument has a value that is not allowed."""


class WrongType(Mistake, TypeError):
    """An argument is an object of a kind that is not allowed, or a call has arguments that do not exist."""


class WrongState(Mistake, RuntimeError):
    """Something was asked for at a time or in a place where it is not possible."""


class Unsupported(Mistake, NotImplementedError):
    """Something is not implemented, by hocket or in a class of the user's."""


class NotFinite(Mistake, FloatingPointError):
    """A loss, gradients or weights are not finite."""


class MissingPackage(Mistake, ModuleNotFoundError):
    """A package is needed and not installed, or in another version."""


class WrongFile(Mistake, OSError):
    """A file or folder cannot be read or written."""


class MissingFile(Mistake, FileNotFoundError):
    """A file that was named does not exist."""


class ExistingFile(Mistake, FileExistsError):
    """A file or folder stands where one would be written."""


class CheckpointError(WrongState):
    """A checkpoint could not be written or read. The message names the file and what is wrong with it.

    Names from files may be long, or control a terminal: long messages are shortened in the middle, and unprintable characters
    are escaped.
    """

    def __init__(self, message: str = "") -> None:
        from hocket.basics.safe_files import printable

        super().__init__(printable(message))


class HocketDeprecationWarning(FutureWarning):
    """Something of hocket's public interface works, but is removed in the version that the message names.

    It is a FutureWarning, because Python shows no DeprecationWarning outside of ``__main__``.
    """


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint was skipped because it is damaged."""
