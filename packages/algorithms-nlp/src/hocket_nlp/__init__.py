"""Training methods and tasks for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket_nlp import functional
    from hocket_nlp.alibi import ALiBi
    from hocket_nlp.huggingface import HuggingFaceTask
    from hocket_nlp.metrics import MaskedAccuracy, Perplexity, TokenCrossEntropy

__all__ = ["ALiBi", "HuggingFaceTask", "MaskedAccuracy", "Perplexity", "TokenCrossEntropy", "functional"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ALiBi": "alibi",
        "HuggingFaceTask": "huggingface",
        "MaskedAccuracy": "metrics",
        "Perplexity": "metrics",
        "TokenCrossEntropy": "metrics",
        "functional": "",
    },
)
