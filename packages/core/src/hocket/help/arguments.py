"""Calls of public functions: arguments of other libraries are explained by insight, and numbers of NumPy converted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Number
from typing import Any, ParamSpec, TypeVar

from hocket.errors import WrongType
from hocket.help import optional_packages

P = ParamSpec("P")
R = TypeVar("R")

#: The signatures of decorated functions by qualified name.
SIGNATURES: dict[str, inspect.Signature] = {}


def understood(
    function: Callable[P, R],
    rearranged: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]] = lambda args, kwargs: args,
) -> Callable[P, R]:
    """Decorate a function of the public interface: explain arguments of other libraries, and convert numbers of NumPy.

    Args:
        rearranged: returns the positional arguments to use, and may change those by name.

    Raises TypeError for an argument that does not exist, is missing or is one too many; the message says what to write.
    """
    signature = SIGNATURES[function.__qualname__] = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        positional = rearranged(args, kwargs)
        try:
            bound = signature.bind(*positional, **kwargs)
        except TypeError as error:
            raise _refusal(error, function, signature, positional, kwargs) from None
        for name, value in bound.arguments.items():
            if type(value).__module__ == "numpy" and isinstance(value, Number):
                bound.arguments[name] = value.item()  # type: ignore[attr-defined]
        return function(*bound.args, **bound.kwargs)

    return call


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that loops call in each step: explain its arguments, which costs time only if they are refused."""
    signature = SIGNATURES[function.__qualname__] = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                raise _refusal(error, function, signature, args, kwargs) from None
            raise

    return call


def unknown(what: str, name: str, value: object) -> str:
    """Return what is wrong with an argument of a function that takes others by any name; empty if it is one of these."""
    return str(optional_packages.ask("failures.calls.unknown", what, name, value) or "")


def _refusal(error: TypeError, *call: object) -> WrongType:
    """Return the error for a call that does not fit a signature, which says what to write if that is known."""
    return WrongType(optional_packages.ask("failures.calls.explanation", *call) or str(error))
