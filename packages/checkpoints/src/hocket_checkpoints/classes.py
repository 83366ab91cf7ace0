"""Names of classes, as checkpoints record and compare them."""

from __future__ import annotations

import re
from typing import Any

from hocket.help.ours import is_ours


def class_of(thing: Any) -> str:
    """Return module and name of its class; see `class_named`."""
    return class_named(full_name(type(thing)))


def full_name(kind: type) -> str:
    """Return module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def class_named(saved: str) -> str:
    """Return the name that checkpoints compare: without the module for hocket's own classes, which may move between modules."""
    return re.sub(r"^\w+\.([a-z0-9_]+\.)*", "hocket.", saved) if is_ours(saved) else saved
