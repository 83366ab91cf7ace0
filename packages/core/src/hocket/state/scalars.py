"""Transfer logged values from the device to the loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hocket.errors import WrongType
from hocket.help import warn
from hocket.state import log_names

if TYPE_CHECKING:
    from hocket.state.state import State

#: Kinds of NumPy's dtypes: complex numbers, bytes and texts.
_NO_NUMBERS = ("c", "S", "U")
_PACKED = {torch.float32, torch.bfloat16, torch.float16}


def flush(state: State) -> None:
    """Pass all values logged since the last flush to the loggers and the history, with one transfer per device."""
    kept = state.values
    values, kept.logged = kept.logged, {}
    if values:
        numbers = to_floats(values)
        kept.history.add(state.timestamp, numbers)
        state.bus.log_metrics(state, numbers)


def log(state: State, values: Mapping[str, Any]) -> None:
    """Log values under any names; plug-ins use `State.log`, which keeps the names of the loop."""
    kept = state.values
    kept.logged.update(values)
    if kept.watched.names:
        kept.watched.update(values)


def log_losses(state: State, losses: Mapping[str, torch.Tensor]) -> None:
    """Log losses of training, whose names are known from the first batch on."""
    state.aggregates.reserve(dict.fromkeys(losses, "a loss of training"))
    log(state, losses)


def reduce_interval(state: State) -> None:
    """Log the values of the logging interval that were logged with a reduction, over all ranks."""
    values = state.aggregates.reduce_interval()
    if values:
        if twice := [name for name in values if name in state.logged]:
            warn(log_names.twice(twice))
        log(state, values)


def to_floats(values: dict[str, Any]) -> dict[str, float]:
    """Convert numbers and scalar tensors to floats, in the same order. Tensors on one device are packed into one transfer.

    Raises TypeError for a value that is not a single number.
    """
    by_device: dict[torch.device, list[str]] = {}
    numbers: dict[str, float] = {}
    for name, value in values.items():
        number = checked(name, value)
        if isinstance(number, torch.Tensor):
            by_device.setdefault(number.device, []).append(name)
        else:
            numbers[name] = number
    for device, names in by_device.items():
        if device.type != "cpu" and len(names) > 1 and all(values[name].dtype in _PACKED for name in names):
            packed = torch.stack([values[name].detach().reshape(()).float() for name in names])
            numbers.update(zip(names, packed.tolist(), strict=True))
        else:  # no transfer to save, or values that float32 would round
            numbers.update((name, values[name].item()) for name in names)
    return {name: numbers[name] for name in values}


def checked(name: str, value: Any) -> float | torch.Tensor:
    """Return a number as a float, and a tensor of one real number as it is. Raises TypeError for other values."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta or value.layout is not torch.strided:
            raise log_names.not_a_number(name, value)
        return value
    array = getattr(getattr(value, "dtype", None), "kind", "")  # NumPy reads texts as numbers, and complex ones as real
    if isinstance(value, str | bytes | bytearray) or array in _NO_NUMBERS or callable(getattr(value, "compute", None)):
        raise log_names.not_a_number(name, value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise log_names.not_a_number(name, value) from None


def named(name: str, value: object) -> dict[str, Any]:
    """Return a number under its name, and the elements of a mapping or a vector under ``name/key``."""
    if isinstance(value, Mapping):
        return {key: item for part, inner in value.items() for key, item in named(f"{name}/{part}", inner).items()}
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() > 1:
        return {f"{name}/{index}": item for index, item in enumerate(value)}
    try:
        return {name: checked(name, value)}
    except (TypeError, RuntimeError):
        raise WrongType(
            f"compute() of the metric of {name!r} returned {log_names.found_instead(value)[0]}. It returns a number, a "
            "vector, or numbers by name. Write return {'first': …, 'second': …} for several."
        ) from None
