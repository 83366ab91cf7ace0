"""The base of every device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Device(ABC):
    """A kind of hardware that torch can compute on.

    Example:
        >>> import hocket, torch
        >>> class Accelerator(hocket.Device):
        ...     def available(self):
        ...         return torch.accelerator.is_available()
        ...     def torch_device(self, local_rank):
        ...         return torch.device(torch.accelerator.current_accelerator().type, local_rank)
    """

    #: Kinds with a higher priority are preferred by ``device="auto"`` where they are available.
    priority: int = 0
    #: Whether it computes while the host goes on, so that looking at a value makes the host wait.
    asynchronous: bool = True

    @abstractmethod
    def available(self) -> bool:
        """Whether this machine has one that torch can use. Must not initialise it."""

    @abstractmethod
    def torch_device(self, local_rank: int) -> torch.device:
        """The device of the process with this rank on its machine."""

    def batch_end(self) -> None:  # noqa: B027  # most have nothing to do
        """Called after every batch of training and evaluation. A device that records operations computes them here."""

    def memory(self) -> dict[str, float]:
        """Memory figures in bytes by name, such as ``peak_allocated``; empty if the device keeps none."""
        return {}

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Floating-point operations per second that one device can do at best, or None where that is not known."""
        return None
