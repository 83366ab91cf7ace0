"""NVIDIA GPUs as their driver's library, NVML, describes them; through the package nvidia-ml-py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hocket.help import installing, warn


class GPU:
    """One GPU."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._nvml, self._handle = pynvml, handle
        #: Whether the driver counts energy, which it does from Volta on.
        self.counts_energy = self._ask("nvmlDeviceGetTotalEnergyConsumption") is not None

    def load(self) -> dict[str, float]:
        """Return utilisation in percent, used memory in bytes, temperature in °C and power in watts, as far as known."""
        found: dict[str, float] = {}
        if (rates := self._ask("nvmlDeviceGetUtilizationRates")) is not None:
            found["percent"] = float(rates.gpu)
        if (memory := self._ask("nvmlDeviceGetMemoryInfo")) is not None:
            found["memory"] = float(memory.used)
        if (temperature := self._ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU)) is not None:
            found["temperature"] = float(temperature)
        if (watts := self.watts()) is not None:
            found["power"] = watts
        return found

    def watts(self) -> float | None:
        """Return the current power, or None."""
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def joules(self) -> float:
        """Return the energy since the driver was loaded, if :attr:`counts_energy`."""
        return float(self._ask("nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle, *args)
        except self._nvml.NVMLError:
            return None


def used_by(model: nn.Module, device: torch.device) -> list[str]:
    """Return the UUIDs of the GPUs that this process trains on: its device, and those of a model over several GPUs."""
    used = {device, *(parameter.device for parameter in model.parameters())}
    found = [torch.cuda.get_device_properties(each).uuid for each in used if each.type == "cuda"] if _there() else []
    return sorted(map(str, found))


def gpus(uuids: Iterable[str] | None = None) -> list[GPU]:
    """Return NVIDIA GPUs by UUID; by default all that this process sees, in torch's order. None while it does not use CUDA.

    Warns if there are GPUs, and nvidia-ml-py or the driver's library is missing.
    """
    if not _there():
        return []
    if importlib.util.find_spec("pynvml") is None:
        warn(
            "The GPUs are not monitored, because the package nvidia-ml-py is not installed. Type: "
            f"{installing.command('monitors')}."
        )
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        if uuids is None:  # NVML numbers all GPUs of the host, and torch the ones visible in CUDA_VISIBLE_DEVICES
            uuids = [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]
        return [GPU(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")) for uuid in uuids]
    except pynvml.NVMLError as error:
        warn(f"The GPUs are not monitored, because the driver's library NVML says: {error}.")
        return []


def _there() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_initialized()
