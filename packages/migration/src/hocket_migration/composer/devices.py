"""Composer's devices, for ``Trainer(device=…)``, which also takes their names."""

from __future__ import annotations


class Device:
    """A kind of device."""

    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class DeviceCPU(Device):
    """The processor."""

    name = "cpu"


class DeviceGPU(Device):
    """A GPU; each rank has its own."""

    name = "gpu"


class DeviceMPS(Device):
    """An Apple GPU."""

    name = "mps"


class DeviceTPU(Device):
    """A TPU."""

    name = "tpu"
