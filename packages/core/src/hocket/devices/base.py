"""The base class of devices."""

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

    #: ``device="auto"`` chooses the available kind with the highest priority.
    priority: int = 0
    #: Whether it computes asynchronously, so that reading a value makes the host wait.
    asynchronous: bool = True

    @abstractmethod
    def available(self) -> bool:
        """Whether this machine has such a device that torch can use. Must not initialize it."""

    @abstractmethod
    def torch_device(self, local_rank: int) -> torch.device:
        """Return the device of the process with this local rank."""

    def batch_end(self) -> None:  # noqa: B027  # a no-op for most devices
        """Run operations that the device has recorded. Called after every batch of training and evaluation."""

    def memory(self) -> dict[str, float]:
        """Return memory statistics in bytes by name, such as ``peak_allocated``; empty if the device has none."""
        return {}

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Return the peak floating-point operations per second of one device, or None if unknown."""
        return None
