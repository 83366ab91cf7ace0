"""The methods of this package as plain functions on tensors, for any training loop."""

from __future__ import annotations

from hocket_general.ema import ema_smoothing, ema_update
from hocket_general.gradient_clipping import clip_gradients
from hocket_general.label_smoothing import smooth_labels, soft_cross_entropy
from hocket_general.sam import sam_perturbation

__all__ = [
    "clip_gradients",
    "ema_smoothing",
    "ema_update",
    "sam_perturbation",
    "smooth_labels",
    "soft_cross_entropy",
]
