"""Small functions on batches, models and devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hocket.data.items import get_item, set_item


def batch_get(batch: Any, key: Any) -> Any:
    """Return the part of a batch at an index, a key or an attribute, or what a function of it returns.

    Example:
        >>> from hocket_migration.composer.utils import batch_get
        >>> batch_get({"x": 1}, "x")
        1
    """
    if isinstance(key, tuple) and len(key) == 2 and all(map(callable, key)):
        key = key[0]
    return key(batch) if callable(key) else get_item(batch, key)


def batch_set(batch: Any, key: Any, value: Any) -> Any:
    """Return a batch with this part replaced; of a pair of functions the second one does it."""
    if isinstance(key, tuple) and len(key) == 2 and all(map(callable, key)):
        return key[1](batch, value)
    return set_item(batch, key, value)


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return a tuple of nothing for None, of the values of a mapping, of the items of a sequence, else of one thing."""
    if x is None:
        return ()
    if isinstance(x, Mapping):
        return tuple(x.values())
    return tuple(x) if isinstance(x, Sequence) and not isinstance(x, str | bytes) else (x,)


def get_device(device: str | None = None) -> torch.device:
    """Return a device of torch by Composer's name; None for a GPU if there is one."""
    if device is None:
        device = "gpu" if torch.cuda.is_available() else "cpu"
    return torch.device({"gpu": "cuda"}.get(device, device))


@contextmanager
def model_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode inside the context, and restore the mode of each submodule afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
