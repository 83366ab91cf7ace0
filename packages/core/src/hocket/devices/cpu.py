"""The CPU."""

import torch

from hocket.devices.base import Device


class CPU(Device):
    """The machine's processor, which is always available.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), device="cpu")
        >>> trainer.state.device
        device(type='cpu')
    """

    asynchronous = False

    def available(self) -> bool:
        """Return True."""
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        """Return ``cpu`` for every rank."""
        return torch.device("cpu")
