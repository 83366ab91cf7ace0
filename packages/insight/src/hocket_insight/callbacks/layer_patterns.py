"""Choose layers of a model by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hocket.errors import WrongType, WrongValue


def patterns_of(given: str | Sequence[str]) -> list[str]:
    """Return one pattern or several as a list. Raises TypeError for anything else."""
    patterns = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if not patterns or not all(isinstance(each, str) for each in patterns):
        raise WrongType(f"«layers={given!r}» is no pattern of names. Give one such as 'encoder.*', or a list of them.")
    return patterns


def chosen(names: Iterable[str], patterns: Sequence[str], who: str) -> list[str]:
    """Return the names that any pattern matches, in their order. Raises ValueError if a pattern matches none."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern.strip("*."), names, 3, 0.3) or names[:3]
            there = f"there are {', '.join(map(repr, near))} and others" if names else "the model has none"
            raise WrongValue(
                f"{who} was given «layers={pattern!r}», which matches none of the {len(names)} layers; {there}. A pattern may "
                "contain *, ? and [abc]; '*' matches all."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
