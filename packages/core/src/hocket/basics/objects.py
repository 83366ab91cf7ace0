"""Objects on their way to another process: tensors of a device travel on the CPU, and arrive on the receiver's own device.

torch pickles a tensor together with the name of its device, and would restore it on the sender's: each rank would create a
context on the GPUs of all others, and compute with tensors of several devices.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: object) -> Any:
        if isinstance(item, torch.device) and item.type != "cpu":
            return item.type, None, None
        if not isinstance(item, torch.Tensor) or item.device.type == "cpu":
            return None
        parameter = item.requires_grad if isinstance(item, torch.nn.Parameter) else None
        return item.device.type, item.detach().cpu(), parameter


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, here: str | None) -> None:
        super().__init__(io.BytesIO(content))
        self._here = here

    def persistent_load(self, saved: Any) -> Any:
        kind, tensor, parameter = saved
        here = torch.empty(0, device=self._here or kind).device  # of a kind of device the current one of this process
        if tensor is None:
            return here
        tensor = tensor.to(here)
        return tensor if parameter is None else torch.nn.Parameter(tensor, parameter)


def pack(item: object) -> bytes:
    """Return an object as bytes, in which no tensor is bound to a device of this process."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(item)
    return buffer.getvalue()


def unpack(content: bytes, here: str | None = None) -> Any:
    """Return the object of `pack`. Its tensors are on this process's device of their kind, or on ``here``."""
    return _Unpickler(content, here).load()
