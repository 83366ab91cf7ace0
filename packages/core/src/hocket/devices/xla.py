"""Devices of torch_xla: TPUs, and its CPU client."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from hocket.basics.plugin_errors import PluginError
from hocket.devices.base import Device
from hocket.errors import WrongValue
from hocket.help import installing


class XLA(Device):
    """The first device of torch_xla, for one process. ``PJRT_DEVICE`` selects the hardware: ``TPU``, or ``CPU`` for trials.

    Operations are recorded until a value is read or a batch ends; then they are compiled, once for each shape.

    Example:
        >>> from hocket.devices.xla import XLA
        >>> device = "xla" if XLA().available() else "cpu"
    """

    priority = 5

    def available(self) -> bool:
        """Whether torch_xla is installed and ``PJRT_DEVICE`` is set. Imports nothing."""
        return bool(os.environ.get("PJRT_DEVICE")) and importlib.util.find_spec("torch_xla") is not None

    def torch_device(self, local_rank: int) -> torch.device:
        """Return the first device. Raises PluginError if torch_xla cannot be imported, ValueError for a second process."""
        if local_rank:
            raise WrongValue(
                "«device='xla'» runs one process. Remove «devices=» and the launcher, or pass «device='cpu'» or "
                "«device='cuda'»."
            )
        device: torch.device = _torch_xla().device()
        return device

    def batch_end(self) -> None:
        """Run the recorded operations, without waiting for them."""
        _torch_xla().sync()


def _torch_xla() -> Any:
    try:
        return importlib.import_module("torch_xla")
    except ImportError as error:
        present = importlib.util.find_spec("torch_xla") is not None
        problem = f"cannot be imported with torch {torch.__version__} ({error})" if present else "is not installed"
        raise PluginError(
            f"«device='xla'» needs the package torch_xla, which {problem}. Install it in a separate environment, because "
            f"it works with torch 2.9 only; type: {installing.command('xla')}. Without it, pass «device='auto'»."
        ) from error
