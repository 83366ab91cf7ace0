"""Which exceptions are errors of the user, whose message says what to type, and which place in a file they are about."""

from __future__ import annotations

import linecache
import re
from typing import TYPE_CHECKING

from hocket.plugins import PluginError

if TYPE_CHECKING:
    from hocket.cli.document import Node


def explains(error: BaseException) -> bool:
    """Whether a `raise` of hocket or its plug-ins raised this exception, so that its message suffices."""
    if isinstance(error, PluginError):
        return True
    if not isinstance(error, ValueError | TypeError | OSError | ImportError | RuntimeError | ArithmeticError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code, scope = trace.tb_frame.f_code, trace.tb_frame.f_globals
    package = str(scope.get("__name__")).partition(".")[0].partition("_")[0]
    line = linecache.getline(code.co_filename, trace.tb_lineno, scope)
    return package == "hocket" and line.strip().startswith("raise ")


def blamed(node: Node, message: str, otherwise: str) -> str:
    """Return the place of the one argument that a message is about, by its name or its value; else another place."""
    children = node.value if isinstance(node.value, dict) else {}
    for pattern in ("{key}={value!r}", "'{key}'", "{key}", "{value!r}"):
        about = [
            child for key, child in children.items() if mentions(message, pattern.format(key=key, value=child.plain()))
        ]
        if len(about) == 1:
            return about[0].where
    return otherwise


def mentions(message: str, text: str) -> bool:
    """Whether a message has a text as a word."""
    return re.search(rf"(?<![\w.]){re.escape(text)}" + ("" if text.endswith("=") else r"(?!\w)"), message) is not None
