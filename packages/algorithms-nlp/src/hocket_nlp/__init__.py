"""Training methods and tasks for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket_nlp import functional
    from hocket_nlp.alibi import ALiBi
    from hocket_nlp.generation import Generate
    from hocket_nlp.huggingface import HuggingFaceTask
    from hocket_nlp.metrics import MaskedAccuracy, Perplexity, TokenCrossEntropy
    from hocket_nlp.pretrained import SavePretrained

__all__ = [
    "ALiBi",
    "Generate",
    "HuggingFaceTask",
    "MaskedAccuracy",
    "Perplexity",
    "SavePretrained",
    "TokenCrossEntropy",
    "functional",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ALiBi": "alibi",
        "Generate": "generation",
        "HuggingFaceTask": "huggingface",
        "MaskedAccuracy": "metrics",
        "Perplexity": "metrics",
        "SavePretrained": "pretrained",
        "TokenCrossEntropy": "metrics",
        "functional": "",
    },
)
