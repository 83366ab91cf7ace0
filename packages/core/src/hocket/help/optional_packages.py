"""Public names of hocket that its other parts define. Without the part they raise NotInstalled with what to type."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from hocket.errors import MissingPackage
from hocket.help.ours import PACKAGES, is_ours


class NotInstalled(MissingPackage):
    """A part of hocket, or a library that is not required, is not installed. The message says what to type."""


def module(name: str, needing: str = "") -> ModuleType:
    """Import a module of another package of hocket, or of a library that is not required.

    Args:
        name: its full name.
        needing: what needs the package, for the message.

    Raises:
        NotInstalled: the package is absent. An error in the package itself remains what it is.

    Example:
        >>> from hocket.help import optional_packages
        >>> optional_packages.module("hocket_testkit.sync").no_sync
        <function no_sync at ...>
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        from hocket.help import installing, names as others  # only needed for error messages

        part = PACKAGES.get(package) or others.own_name(package, "distributions") or package
        what = f"{needing} needs {part}, which" if needing else part
        raise NotInstalled(f"{what} is not installed. Type: {installing.library(part)}", name=package) from None


def ask(function: str, *facts: object) -> Any:
    """Call a function of hocket-insight, such as ``failures.calls.unknown``, and return its result; None if it is absent.

    Those named ``check`` or ``warn`` raise, or warn of, mistakes that are harmless or would be noticed later.
    """
    place, _, name = function.rpartition(".")
    try:
        part = module(f"hocket_insight.{place}")
    except NotInstalled:
        return None
    return getattr(part, name)(*facts)


def names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module of core that has the public names of a part of hocket."""

    def getattribute(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        try:
            return getattr(module(package), name)
        except NotInstalled as absent:
            raise AttributeError(absent.msg, name=name) from None

    return getattribute, lambda: dir(module(package)) if find_spec(package.partition(".")[0]) else []


class _Explaining:
    """Let ``from package import name`` raise the text of ``package.name``, where Python's own ImportError has none.

    ``hasattr``, ``help`` and completion expect an AttributeError of a package. Import statements discard it, and look for a
    module of this name, last here.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, attribute = name.rpartition(".")
        if is_ours(package) and attribute[0] != "_" and "__getattr__" in vars(sys.modules.get(package, object)):
            try:
                getattr(sys.modules[package], attribute)
            except AttributeError as error:
                raise MissingPackage(str(error), name=attribute) from None


sys.meta_path.append(_Explaining)
