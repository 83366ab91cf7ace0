"""Public names of hocket that its other parts define. Without the part they raise NotInstalled with what to type."""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any

from hocket.errors import MissingPackage
from hocket.ours import PACKAGES


class NotInstalled(MissingPackage):
    """A part of hocket is not installed. The message says what to type."""


def module(name: str, needing: str = "") -> ModuleType:
    """Import a module of another package of hocket.

    Args:
        name: its full name.
        needing: what needs the package, for the message.

    Raises:
        NotInstalled: the package is absent. An error in the package itself remains what it is.

    Example:
        >>> from hocket import elsewhere
        >>> elsewhere.module("hocket_testkit.sync").no_sync
        <function no_sync at ...>
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        from hocket.help import installing  # only needed for error messages

        part = PACKAGES[package]
        what = f"{needing} needs {part}, which" if needing else part
        raise NotInstalled(f"{what} is not installed. Type: {installing.library(part)}", name=package) from None


def names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module of core that has the public names of a part of hocket."""

    def getattribute(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        try:
            return getattr(module(package), name)
        except NotInstalled as absent:
            raise unless_imported(absent, name) from None

    return getattribute, lambda: dir(module(package)) if find_spec(package.partition(".")[0]) else []


def unless_imported(absent: NotInstalled, name: str) -> Exception:
    """Return the error for an attribute of a module: `absent` in an import statement, and an AttributeError elsewhere.

    ``hasattr``, ``help`` and completion expect the latter. To be called by a module's ``__getattr__``.
    """
    return absent if is_import(sys._getframe(2)) else AttributeError(absent.msg, name=name)


def is_import(frame: FrameType) -> bool:
    """Whether a frame asks for the attribute of a module in ``from module import name``."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
