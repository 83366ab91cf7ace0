"""Calls of public functions: arguments of other libraries are explained by insight, and numbers of NumPy converted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
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
            raise WrongType(_explanation(function, signature, positional, kwargs) or str(error)) from None
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
                raise WrongType(_explanation(function, signature, args, kwargs) or str(error)) from None
            raise

    return call


def unknown(what: str, name: str, value: object) -> str:
    """Return what is wrong with an argument of a function that takes others by any name; empty if it is one of these."""
    try:
        calls = optional_packages.module("hocket_insight.failures.calls")
    except optional_packages.NotInstalled:
        return ""
    text: str = calls.unknown(what, name, value)
    return text


def _explanation(
    function: Callable[..., object], signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return what is wrong with a call and what to write, or empty if it is not known."""
    try:
        calls = optional_packages.module("hocket_insight.failures.calls")
    except optional_packages.NotInstalled:
        return ""
    text: str = calls.explanation(function, signature, args, kwargs)
    return text
