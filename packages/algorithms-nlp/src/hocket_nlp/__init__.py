"""Training methods for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket_nlp import functional
    from hocket_nlp.alibi import ALiBi

__all__ = ["ALiBi", "functional"]

__getattr__, __dir__ = lazy(__name__, {"ALiBi": "alibi", "functional": ""})
