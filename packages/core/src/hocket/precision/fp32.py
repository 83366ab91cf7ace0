"""Single precision."""

from hocket.precision.base import Precision


class FP32(Precision):
    """Train in single precision: neither the model nor the batches are converted.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision="fp32", device="cpu")
    """
