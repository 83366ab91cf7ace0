"""Single precision."""

from hocket.precision.base import Precision


class FP32(Precision):
    """32-bit floats throughout: the model and the batches as they are.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), precision="fp32", device="cpu")
    """
