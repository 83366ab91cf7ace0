"""The methods of this package as plain functions on models and batches, for any training loop."""

from __future__ import annotations

from hocket_nlp.alibi import alibi
from hocket_nlp.linear_bias import alibi_slopes
from hocket_nlp.sequence_length import scale_sequence_length

__all__ = ["alibi", "alibi_slopes", "scale_sequence_length"]
