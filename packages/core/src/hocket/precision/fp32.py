"""Single precision."""

from hocket.precision.base import Precision


class FP32(Precision):
    """32-bit floats throughout: the model and the batches as they are."""
