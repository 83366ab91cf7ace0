"""Training methods, tasks and data for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_nlp import functional as functional
    from hocket_nlp.alibi import ALiBi as ALiBi
    from hocket_nlp.alibi_policies import AlibiPolicy as AlibiPolicy
    from hocket_nlp.datasets import python_tokenizer as python_tokenizer, text_python as text_python
    from hocket_nlp.fused_cross_entropy import FusedCrossEntropy as FusedCrossEntropy
    from hocket_nlp.gated_linear_units import GatedLinearUnits as GatedLinearUnits
    from hocket_nlp.generation import Generate as Generate
    from hocket_nlp.huggingface import HuggingFaceTask as HuggingFaceTask
    from hocket_nlp.metrics import (
        MaskedAccuracy as MaskedAccuracy,
        Perplexity as Perplexity,
        TokenCrossEntropy as TokenCrossEntropy,
    )
    from hocket_nlp.packing import Packing as Packing
    from hocket_nlp.pretrained import SavePretrained as SavePretrained
    from hocket_nlp.qk_norm import QKNorm as QKNorm
    from hocket_nlp.rope_scaling import RoPEScaling as RoPEScaling
    from hocket_nlp.seq_length_warmup import SeqLengthWarmup as SeqLengthWarmup
    from hocket_nlp.z_loss import ZLoss as ZLoss

__getattr__, __dir__ = lazy(__name__)
