"""Apple GPUs."""

import torch

from hocket.devices.base import Device
from hocket.errors import WrongValue


class MPS(Device):
    """An Apple GPU that torch reaches through Metal.

    Example:
        >>> from hocket.devices.mps import MPS
        >>> device = "mps" if MPS().available() else "cpu"
    """

    priority = 10

    def available(self) -> bool:
        """Whether torch sees an Apple GPU."""
        return torch.backends.mps.is_available()

    def torch_device(self, local_rank: int) -> torch.device:
        """Return the only device of the machine; raises ValueError without one, or for a second process."""
        if local_rank:
            raise WrongValue("A machine has one mps device, so it runs one process. Pass «device='cpu'» for several.")
        if not self.available():
            raise WrongValue("torch sees no Apple GPU on this machine. Pass «device='cpu'», or «device='auto'».")
        return torch.device("mps")

    def memory(self) -> dict[str, float]:
        """Return Metal's memory statistics, in bytes."""
        return {"allocated": float(torch.mps.current_allocated_memory())}
