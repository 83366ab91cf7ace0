"""Small functions on batches, models and devices."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hocket.basics.display import notebook
from hocket.data.items import get_item, set_item
from hocket.errors import WrongValue
from hocket_migration.composer.core.event import Event
from hocket_migration.composer.core.time import Time, TimeUnit
from hocket_migration.composer.devices import Device, best_device, device_named

#: The dtypes of Composer's names.
STR_TO_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Call a function with each element of a list, tuple or dict, or with one thing; return the results in the same kind."""
    if collection is None:
        return None
    if isinstance(collection, list | tuple):
        return type(collection)(map_fn(each) for each in collection)
    if isinstance(collection, dict):
        return {key: map_fn(each) for key, each in collection.items()}
    return map_fn(collection)


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return a tuple of nothing for None, of the values of a mapping, of the items of a sequence, else of one thing."""
    if x is None:
        return ()
    if isinstance(x, Mapping):
        return tuple(x.values())
    return tuple(x) if isinstance(x, Sequence) and not isinstance(x, str | bytes) else (x,)


def get_device(device: str | Device | None = None) -> Device:
    """Return a device by Composer's name; None for a GPU if there is one. Raises ValueError for other names."""
    if isinstance(device, Device):
        return device
    return best_device() if device is None else device_named(device)


def is_model_ddp(model: nn.Module) -> bool:
    """Whether a model is wrapped by torch's DistributedDataParallel."""
    return isinstance(model, nn.parallel.DistributedDataParallel)


def is_model_fsdp(model: nn.Module) -> bool:
    """Whether ranks hold shards of a model's weights."""
    return any(isinstance(each, DTensor) for each in model.parameters())


def is_xla_installed() -> bool:
    """Whether there is torch_xla."""
    return importlib.util.find_spec("torch_xla") is not None


def is_notebook() -> bool:
    """Whether this is a notebook."""
    return notebook() is not None


def get_free_tcp_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def create_interval_scheduler(
    interval: int | str | Time,
    include_end_of_training: bool = True,
    checkpoint_events: bool = True,
    final_events: Collection[Event] | None = None,
) -> Callable[[Any, Event], bool]:
    """Return a function for ``eval_interval`` and ``save_interval`` that agrees in an interval, and at the end of training.

    Args:
        interval: a number of epochs, or a time.
        include_end_of_training: whether it agrees at the end, once.
        checkpoint_events: whether it agrees on BATCH_CHECKPOINT and EPOCH_CHECKPOINT, else on BATCH_END and EPOCH_END.
        final_events: those on which it agrees at the end; None for BATCH_CHECKPOINT and EPOCH_CHECKPOINT.

    Raises:
        ValueError: the interval is in ``dur``, which both take as a text.
    """
    every = Time.from_input(interval, "ep")
    if every.unit is TimeUnit.DURATION:
        raise WrongValue(f"create_interval_scheduler('{every}'): pass '{every}' itself as the interval.")
    epochs = every.unit is TimeUnit.EPOCH
    checkpoint = Event.EPOCH_CHECKPOINT if epochs else Event.BATCH_CHECKPOINT
    on = checkpoint if checkpoint_events else Event.EPOCH_END if epochs else Event.BATCH_END
    final = {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT} if final_events is None else {*final_events}
    agreed: Any = -1

    def due(state: Any, event: Event) -> bool:
        nonlocal agreed
        if every.value <= 0:
            return False
        over = state.max_duration is not None and state.timestamp >= state.max_duration
        if include_end_of_training and over and event in final and state.timestamp.batch != agreed:
            return True
        before, now = (each.get(every.unit).value for each in (state.previous_timestamp, state.timestamp))
        if event is on and before // every.value != now // every.value:
            agreed = state.timestamp.batch
            return True
        return False

    return due


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
