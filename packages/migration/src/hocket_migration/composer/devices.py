"""Composer's devices, for ``Trainer(device=…)``, which also takes their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.errors import WrongValue


class Device:
    """A kind of device, and what moves tensors to it.

    Example:
        >>> import torch
        >>> from hocket_migration.composer.devices import DeviceCPU
        >>> DeviceCPU().batch_to_device({"x": [torch.ones(1)]})
        {'x': [tensor([1.])]}
    """

    name: str
    dist_backend: str
    _type: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device."""
        return tensor.to(self._type, non_blocking=True)

    def module_to_device(self, module: nn.Module) -> nn.Module:
        """Move a module, and return it."""
        return module.to(self._type)

    def batch_to_device(self, batch: Any) -> Any:
        """Return a batch with its tensors on the device: in lists, tuples and mappings too."""
        if isinstance(batch, Tensor):
            return self.tensor_to_device(batch)
        if isinstance(batch, Mapping):
            return {key: self.batch_to_device(each) for key, each in batch.items()}
        if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
            return batch
        moved = [self.batch_to_device(each) for each in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)  # type: ignore[call-arg]

    def optimizer_to_device(self, optimizer: Optimizer) -> Optimizer:
        """Move an optimizer's state, and return the optimizer."""
        for state in optimizer.state.values():
            state.update(self.batch_to_device(state))
        return optimizer


class DeviceCPU(Device):
    """The processor."""

    name, dist_backend, _type = "cpu", "gloo", "cpu"


class DeviceGPU(Device):
    """A GPU; each rank has its own."""

    name, dist_backend, _type = "gpu", "nccl", "cuda"


class DeviceMPS(Device):
    """An Apple GPU."""

    name, dist_backend, _type = "mps", "", "mps"


class DeviceTPU(Device):
    """A TPU."""

    name, dist_backend, _type = "tpu", "xla", "xla"


_KINDS: dict[str, type[Device]] = {each.name: each for each in (DeviceCPU, DeviceGPU, DeviceMPS, DeviceTPU)}


def device_named(name: str) -> Device:
    """Return a device by Composer's name, or by torch's. Raises ValueError for others."""
    kinds = {**_KINDS, **{each._type: each for each in _KINDS.values()}}
    if name not in kinds:
        raise WrongValue(f"device={name!r} is not one of {', '.join(map(repr, _KINDS))}.")
    return kinds[name]()


def best_device() -> Device:
    """Return the GPU if torch sees one, else an Apple GPU, else the CPU."""
    found = DeviceGPU if torch.cuda.is_available() else DeviceMPS if torch.mps.is_available() else DeviceCPU
    return found()
