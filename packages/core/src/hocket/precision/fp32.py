"""Single precision."""

from hocket.precision.base import Precision


class FP32(Precision):
    """Train in single precision: neither the model nor the batches are converted."""
