"""Find handlers in a module's source that drop every exception."""

from __future__ import annotations

import ast
import inspect
from typing import Any

_EVERYTHING = {"Exception", "BaseException"}


def silent_handlers(obj: Any) -> list[int]:
    """Return the lines of `except Exception` and the like, in the module of ``obj``, that neither raise, call nor use the error.

    ``contextlib.suppress(Exception)`` counts, too.

    Example:
        >>> from hocket_testkit.handlers import silent_handlers
        >>> silent_handlers(silent_handlers)
        []
    """
    module = inspect.getmodule(obj)
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else None
    except (OSError, TypeError):
        tree = None
    nodes = [] if tree is None else list(ast.walk(tree))
    handlers = [each.lineno for each in nodes if isinstance(each, ast.ExceptHandler) and _drops(each)]
    calls = [each for each in nodes if isinstance(each, ast.Call) and _name(each.func) == "suppress"]
    return sorted([*handlers, *(each.lineno for each in calls if _EVERYTHING & set(map(_name, each.args)))])


def _drops(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    everything = handler.type is None or bool(_EVERYTHING & set(map(_name, caught)))
    acts = any(isinstance(node, ast.Raise | ast.Call) for statement in handler.body for node in ast.walk(statement))
    uses = any(
        isinstance(node, ast.Name) and node.id == handler.name
        for statement in handler.body
        for node in ast.walk(statement)
    )
    return everything and not acts and not uses


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
