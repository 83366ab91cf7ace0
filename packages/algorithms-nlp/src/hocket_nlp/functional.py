"""The methods of this package as plain functions on models and batches, for any training loop."""

from __future__ import annotations

from hocket_nlp.alibi import alibi
from hocket_nlp.fused_cross_entropy import fused_cross_entropy
from hocket_nlp.gated_linear_units import gated_linear_units
from hocket_nlp.linear_bias import alibi_slopes
from hocket_nlp.linear_cross_entropy import linear_cross_entropy
from hocket_nlp.packed_rows import pack
from hocket_nlp.qk_norm import normalize_heads, qk_norm
from hocket_nlp.rope_scaling import rope_scaling
from hocket_nlp.seq_length_warmup import warmup_sequence_length
from hocket_nlp.sequence_length import reshape_sequences, scale_sequence_length, truncate_sequences
from hocket_nlp.z_loss import z_loss

__all__ = [
    "alibi",
    "alibi_slopes",
    "fused_cross_entropy",
    "gated_linear_units",
    "linear_cross_entropy",
    "normalize_heads",
    "pack",
    "qk_norm",
    "reshape_sequences",
    "rope_scaling",
    "scale_sequence_length",
    "truncate_sequences",
    "warmup_sequence_length",
    "z_loss",
]
