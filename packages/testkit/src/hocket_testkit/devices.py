"""The suite for devices."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

import hocket
from hocket_testkit.compare import difference
from hocket_testkit.conformance import weights
from hocket_testkit.runs import RunConformance


class DeviceConformance(RunConformance):
    """The tests that every device must pass. Define ``make``. On a machine without the device, those that compute are skipped.

    Example:
        >>> import hocket
        >>> from hocket.devices.cpu import CPU
        >>> class TestCPU(hocket.testkit.DeviceConformance):
        ...     def make(self):
        ...         return CPU()
    """

    kind = "devices"
    test_implements_known_hooks_only = None  # type: ignore[assignment]  # its base class has them

    def make(self) -> hocket.Device:
        """Return a new device."""
        device: hocket.Device = super().make()
        return device

    def trainer(self, plugin: Any = None, **changes: Any) -> hocket.Trainer:
        """Return a Trainer as in every suite; skip the test where the device is not available."""
        if plugin is not None and not plugin.available():
            pytest.skip(f"this machine has no {type(plugin).__name__}")
        return super().trainer(plugin, **changes)

    def test_is_a_device(self) -> None:
        """It inherits from hocket.Device, with numbers and bools where ``device="auto"`` compares them."""
        device = self.make()
        who = type(device).__name__
        assert isinstance(device, hocket.Device), f"{who} is not a hocket.Device. Inherit from it."
        assert isinstance(device.priority, int | float), (
            f"{who}.priority is {device.priority!r}, and should be a number."
        )
        assert isinstance(device.asynchronous, bool), (
            f"{who}.asynchronous is {device.asynchronous!r}: write True or False."
        )

    def test_is_asked_without_being_started(self) -> None:
        """``available`` returns a bool, on any machine, and initialises nothing: a process can be forked afterwards."""
        cls = type(self.make())
        assert isinstance(self.make().available(), bool), f"{cls.__name__}.available() returns no bool."
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import torch; from {cls.__module__} import {cls.__name__} as Device\n"
            "before = set(sys.modules); Device().available(); print('started' if torch.cuda.is_initialized() else 'asked')"
        )
        if "<locals>" in cls.__qualname__ or cls.__module__ == "__main__":
            pytest.skip("its class cannot be imported")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"Asking available() in a new process fails: {done.stderr.strip()[-300:]}"
        assert done.stdout.split()[-1:] == ["asked"], (
            f"{cls.__name__}.available() initialises CUDA, after which no process can be forked. Ask the driver, or "
            "torch.accelerator, without using the device."
        )

    def test_names_the_device_of_a_rank(self) -> None:
        """``torch_device(0)`` is a torch.device on which a tensor can be made."""
        device = self._available()
        given = device.torch_device(0)
        assert isinstance(given, torch.device), (
            f"torch_device(0) is {given!r}. Return torch.device('kind', local_rank)."
        )
        made = torch.ones(3, device=given)
        assert made.sum().item() == 3.0 and made.device.type == given.type

    def test_trains_as_the_processor_does(self) -> None:
        """One epoch ends near the weights that it has on the CPU."""
        ours, cpu = self.trainer(self._available()), self.trainer()
        ours.fit("1ep")
        cpu.fit("1ep")
        found = difference(weights(ours), weights(cpu), self.tolerance("test_trains_as_the_processor_does", 1e-3))
        assert found is None, f"An epoch on the device ends with other weights than on the CPU: {found}."

    def test_memory_is_in_bytes(self) -> None:
        """``memory()`` has finite numbers of bytes by name, or nothing; ``peak_flops`` a number, or None."""
        device = self._available()
        memory = device.memory()
        wrong = {
            name: value
            for name, value in memory.items()
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0
        }
        assert not wrong, f"memory() has {wrong}. Return bytes as numbers of 0 or more, by lower-case names."
        flops = device.peak_flops(torch.bfloat16)
        assert flops is None or flops > 0, f"peak_flops(torch.bfloat16) is {flops!r}. Return None if it is unknown."

    def _available(self) -> hocket.Device:
        device = self.make()
        if not device.available():
            pytest.skip(f"this machine has no {type(device).__name__}")
        return device
