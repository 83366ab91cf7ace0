"""Training in one process, on one device."""

from hocket.strategies.base import Strategy


class SingleDevice(Strategy):
    """Train in this process, on one device.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), strategy="single", device="cpu")
    """
