"""Make a plug-in as the example in its docstring does."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
from collections.abc import Callable
from typing import Any

from hocket.basics import seeding
from hocket.errors import WrongState


def maker(obj: Any) -> Callable[[], Any]:
    """Return a function that makes a plug-in, as the first call in its docstring's example does, else without arguments.

    Raises:
        hocket.errors.WrongState: it needs arguments, and no example shows them.

    Example:
        >>> from hocket_testkit.examples import maker
        >>> class Smoothing:
        ...     '''Smooth.
        ...
        ...     Example:
        ...         >>> smoothing = Smoothing(0.2)
        ...     '''
        ...     def __init__(self, by):
        ...         self.by = by
        >>> maker(Smoothing)().by
        0.2
    """
    if (found := _call(obj)) is None:
        try:
            inspect.signature(obj).bind()
        except TypeError as error:
            raise WrongState(
                f"{obj.__name__} cannot be made without arguments ({error}), and its docstring has no example that makes one. "
                f"Write a line such as `>>> {obj.__name__}(…)` under `Example:` in the docstring."
            ) from None
        return lambda: obj()
    before, call = found

    def make() -> Any:
        names: dict[str, Any] = {obj.__name__: obj}
        with seeding.preserved(), contextlib.redirect_stdout(io.StringIO()):
            for statement in before:
                exec(compile(ast.Module([statement], []), "<example>", "exec"), names)
            return eval(compile(ast.Expression(call), "<example>", "eval"), names)

    return make


def keywords(obj: Any) -> dict[str, Any]:
    """Return the constant keyword arguments of the first call in the example, such as an optimizer's learning rate."""
    found = _call(obj)
    values = [] if found is None else [each for each in found[1].keywords if isinstance(each.value, ast.Constant)]
    return {each.arg: each.value.value for each in values if each.arg and isinstance(each.value, ast.Constant)}


def _call(obj: Any) -> tuple[list[ast.stmt], ast.Call] | None:
    """Return the statements before the first call of ``obj`` in its example, and the call."""
    name = getattr(obj, "__name__", "")
    before: list[ast.stmt] = []
    try:
        statements = [
            statement
            for example in doctest.DocTestParser().get_examples(inspect.getdoc(obj) or "")
            for statement in ast.parse(example.source).body
        ]
    except (SyntaxError, ValueError):
        return None
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and name in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
                return before, node
        before.append(statement)
    return None
