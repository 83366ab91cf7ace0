"""Training methods for language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket_nlp import functional
    from hocket_nlp.alibi import ALiBi

__all__ = ["ALiBi", "functional"]


def __getattr__(name: str) -> Any:
    if name == "ALiBi":
        return importlib.import_module("hocket_nlp.alibi").ALiBi
    if name == "functional":
        return importlib.import_module("hocket_nlp.functional")
    raise AttributeError(f"module 'hocket_nlp' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
