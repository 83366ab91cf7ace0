"""Find handlers in a module's source that drop every exception."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from hocket.hookspecs import SPECS


def silent_handlers(obj: Any) -> list[int]:
    """Return the lines in the module of ``obj`` that drop every exception.

    These are `except Exception`, and the like, whose block does nothing, or which in a hook neither raises nor calls anything,
    such as a warning, and ``contextlib.suppress(Exception)``.

    Example:
        >>> from hocket_testkit.handlers import silent_handlers
        >>> silent_handlers(silent_handlers)
        []
    """
    module = inspect.getmodule(obj)
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError):
        return []  # it has no source
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    hooks = {node for each in functions if each.name in _HOOKS for node in ast.walk(each)}
    nodes = list(ast.walk(tree))
    handlers = [each for each in nodes if isinstance(each, ast.ExceptHandler) and _catches_all(each.type)]
    calls = [each for each in nodes if isinstance(each, ast.Call) and _name(each.func) == "suppress"]
    return sorted(
        [each.lineno for each in handlers if all(_does_nothing(line, each in hooks, each.name) for line in each.body)]
        + [each.lineno for each in calls if any(map(_catches_all, each.args))]
    )


#: Functions in which going on hides an error from the loop.
_HOOKS = {"apply", "match", "step", *(hook for spec in SPECS for hook in vars(spec) if not hook.startswith("_"))}


def _catches_all(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return caught is None or bool({"Exception", "BaseException"} & set(map(_name, names)))


def _does_nothing(statement: ast.stmt, in_hook: bool, error: str | None) -> bool:
    if in_hook:
        nodes = list(ast.walk(statement))
        uses = any(isinstance(each, ast.Name) and each.id == error for each in nodes)
        return not uses and not any(isinstance(each, ast.Raise | ast.Call) for each in nodes)
    return isinstance(statement, ast.Pass | ast.Continue) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
