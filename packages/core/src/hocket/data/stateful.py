"""Objects that save and restore their own state."""

from __future__ import annotations

from typing import Any


def has_state(owner: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))
