"""Transfer logged values from the device to the loggers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hocket.help import logged as help_logged

if TYPE_CHECKING:
    from hocket.state import State

_PACKED = {torch.float32, torch.bfloat16, torch.float16}


def flush(state: State) -> None:
    """Pass all values logged since the last flush to the loggers and the history, with one transfer per device."""
    values, state.logged = state.logged, {}
    if values:
        numbers = to_floats(values)
        state.history.add(state.timestamp, numbers)
        state.bus.log_metrics(state, numbers)


def log(state: State, values: Mapping[str, Any]) -> None:
    """Log values under any names; plug-ins use `State.log`, which keeps the names of the loop."""
    state.logged.update(values)
    if state.watched.names:
        state.watched.update(values)


def log_losses(state: State, losses: Mapping[str, torch.Tensor]) -> None:
    """Log losses of training, whose names are known from the first batch on."""
    state.aggregates.reserve(dict.fromkeys(losses, "a loss of training"))
    log(state, losses)


def reduce_interval(state: State) -> None:
    """Log the values of the logging interval that were logged with a reduction, over all ranks."""
    values = state.aggregates.reduce_interval()
    if values:
        if twice := [name for name in values if name in state.logged]:
            warnings.warn(help_logged.twice(twice), stacklevel=2)
        log(state, values)


def to_floats(values: dict[str, Any]) -> dict[str, float]:
    """Convert numbers and scalar tensors to floats, in the same order. Tensors on one device are packed into one transfer.

    Raises TypeError for a value that is not a single number.
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, value in values.items():
        if type(value) is not float and isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise TypeError(
                    f"'{name}' was logged as a tensor of shape {tuple(value.shape)}; log scalars, such as its mean()."
                )
            by_device.setdefault(value.device, []).append(name)
    numbers: dict[str, float] = {}
    for device, names in by_device.items():
        if device.type != "cpu" and len(names) > 1 and all(values[name].dtype in _PACKED for name in names):
            packed = torch.stack([values[name].detach().reshape(()).float() for name in names])
            numbers.update(zip(names, packed.tolist(), strict=True))
        else:  # no transfer to save, or values that float32 would round
            numbers.update((name, values[name].item()) for name in names)
    try:
        return {
            name: value if type(value) is float else numbers[name] if name in numbers else float(value)
            for name, value in values.items()
        }
    except (TypeError, ValueError):
        bad = next(name for name, value in values.items() if not isinstance(value, int | float | torch.Tensor))
        raise TypeError(
            f"'{bad}' was logged as {type(values[bad]).__name__}; log numbers or tensors of one element."
        ) from None


def named(name: str, value: Any) -> dict[str, Any]:
    """Return a number under its name, and the elements of a mapping or a vector under ``name/key``."""
    if isinstance(value, Mapping):
        return {key: item for part, inner in value.items() for key, item in named(f"{name}/{part}", inner).items()}
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() > 1:
        return {f"{name}/{index}": item for index, item in enumerate(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {name: value}
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError):
        found = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__}"
        )
        raise TypeError(
            f"compute() of the metric of {name!r} returned {found}. It returns a number, a vector, or numbers by name. Write "
            "return {'first': …, 'second': …} for several."
        ) from None
