"""Optimizers and schedules as other libraries take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket.errors import WrongType, WrongValue
from hocket.help.names import closest
from hocket.plugins import registry


def check_configured(given: Any) -> None:
    """Raise TypeError for what Lightning's ``configure_optimizers`` may return."""
    nested = isinstance(given, tuple | list) and any(isinstance(item, tuple | list) for item in given)
    if nested or (isinstance(given, Mapping) and {"lr_scheduler", "optimizer"} & given.keys()):
        raise WrongType(
            f"configure_optimizers() returned {'nested lists' if nested else 'a dict of ' + ', '.join(map(repr, given))}. "
            "It returns an optimizer, a sequence of optimizers or a dict of optimizers by name, without schedules. Write "
            "return optimizer, and Trainer(schedule='cosine(warmup=0.05dur)')."
        )


def check_names(given: Mapping[Any, Any], names: Sequence[str]) -> None:
    """Raise ValueError for a dict of schedules with a key that is like the name of an optimizer."""
    if wrong := _misnamed(given, names):
        raise WrongValue(
            f"«schedule={{{wrong[0]!r}: …}}» names no optimizer; there {'is' if len(names) == 1 else 'are'} "
            f"{', '.join(map(repr, names))}. Write {wrong[1]!r}."
        )


def _misnamed(given: Mapping[Any, Any], names: Sequence[str]) -> tuple[str, str] | None:
    """Return a key of a dict of schedules that is like the name of an optimizer, and that name; None for another dict."""
    known = registry.names("schedules")
    for key, item in given.items():
        near = closest(key, names, 0.7)
        if not near and len(names) > 1 and (callable(item) or isinstance(item, str)):
            near = names[0]
        if near and near != key and key not in known:
            return str(key), near
    return None
