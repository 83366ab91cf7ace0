"""Check the numbers and switches that an algorithm is given, before anything is computed with them."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from hocket.basics.short_repr import short
from hocket.errors import WrongType, WrongValue


def whole_number(
    who: str, name: str, given: Any, example: int, *, least: int = 1, of: str = "tokens", optional: bool = False
) -> Any:
    """Return ``given`` as an int, or None if that is ``optional``.

    Raises:
        TypeError: it is not a whole number; the message names ``who`` and the argument, and says what to write.
        ValueError: it is less than ``least``.
    """
    if given is None and optional:
        return None
    allowed = f"a whole number of {of}, {least} or more" + (", or None" if optional else "")
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise _wrong_type(who, name, given, allowed, _in_text(given, int) or example)
    if given < least:
        raise WrongValue(f"{who} was given {name}={given}: give {allowed}. Write for instance {name}={example}.")
    return int(given)


def number(
    who: str,
    name: str,
    given: Any,
    example: float,
    *,
    above: float = 0,
    least: float | None = None,
    optional: bool = False,
) -> Any:
    """Return ``given`` as an int or a float, or None if that is ``optional``.

    Raises:
        TypeError: it is not a number; the message names ``who`` and the argument, and says what to write.
        ValueError: it is not above ``above``, or not at least ``least`` if that is given; or it is NaN or infinite.
    """
    if given is None and optional:
        return None
    bound = f"above {above}" if least is None else f"of at least {least}"
    allowed = f"a finite number {bound}" + (", or None" if optional else "")
    if isinstance(given, bool) or not isinstance(given, Real):
        raise _wrong_type(who, name, given, allowed, _in_text(given, float) or example)
    value = int(given) if isinstance(given, Integral) else float(given)
    if not (value > above if least is None else value >= least) or math.isinf(value):
        raise WrongValue(f"{who} was given {name}={given}: give {allowed}. Write for instance {name}={example}.")
    return value


def switch(who: str, name: str, given: Any) -> bool:
    """Return ``given``. Raises TypeError if it is not a bool: the text "no" would count as true."""
    if not isinstance(given, bool):
        raise _wrong_type(who, name, given, "True or False", True)
    return given


def _wrong_type(who: str, name: str, given: Any, allowed: str, example: Any) -> TypeError:
    given = short(given) + ("" if given is None else f", which is {type(given).__name__}")
    return WrongType(f"{who} was given {name}={given}: give {allowed}. Write for instance {name}={example}.")


def _in_text(given: Any, kind: Any) -> Any:
    """Return the number that a text holds; None for anything else."""
    try:
        return kind(given) if isinstance(given, str) and math.isfinite(float(given)) else None
    except ValueError:
        return None
