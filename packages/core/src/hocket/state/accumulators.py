"""Running reductions of logged values: on this rank without waiting for the device, then over ranks on the host."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hocket.basics.dtensors import full

Reduce: TypeAlias = Literal["mean", "sum", "min", "max", "last", "metric"]
#: What a value is reduced over: the logging interval, the epoch, or both.
Over: TypeAlias = Literal["interval", "epoch"] | Sequence[Literal["interval", "epoch"]]
#: The ways to reduce numbers.
REDUCTIONS = ("mean", "sum", "min", "max", "last")
#: What one rank has of a name: for a mean its sum and the sum of its weights; for a sum or an extreme its value and the number
#: of values; for a metric its state, and 1 or 0.
Held: TypeAlias = tuple[Any, float]


def precise(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: double precision, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


class Total:
    """A sum of numbers on the host and of scalar tensors on the device.

    In float32 it also sums the rounding errors (Kahan, Pracniques: further remarks on reducing truncation errors, 1965).
    """

    __slots__ = ("_lost", "number", "tensor")

    def __init__(self) -> None:
        self.number = 0.0
        self.tensor: Tensor | None = None
        self._lost: Tensor | None = None

    def add(self, value: float | Tensor, factor: float = 1.0) -> None:
        """Add ``factor * value``; a tensor has the dtype of `precise`."""
        if type(value) is float:
            self.number += value * factor
            return
        assert not isinstance(value, float)
        if self.tensor is None:
            self.tensor = value * factor
        elif self.tensor.dtype is torch.float64:
            self.tensor = torch.add(self.tensor, value, alpha=factor)  # a new tensor, so that a copy keeps its value
        else:
            added = value * factor if self._lost is None else value * factor - self._lost
            total = self.tensor + added
            self._lost, self.tensor = (total - self.tensor) - added, total

    def state(self) -> list[Any]:
        """Return the sum as plain data."""
        return [self.number, self.tensor, self._lost]

    def load(self, state: Sequence[Any], device: torch.device) -> None:
        """Undo :meth:`state`."""
        self.number = state[0]
        self.tensor, self._lost = (part if part is None else part.to(device, precise(device)) for part in state[1:])

    def tensors(self) -> list[Tensor]:
        """Return the tensors whose values :meth:`read` takes."""
        return [part for part in (self.tensor, self._lost) if part is not None]

    def read(self, values: Sequence[float]) -> float:
        """Return the sum, given the values of :meth:`tensors`."""
        return self.number + (values[0] if values else 0.0) - (values[1] if len(values) > 1 else 0.0)


class Accumulator:
    """The running reduction of one name. Its tensors stay on the device until `read`. Subclasses inherit the documentation.

    Args:
        device: where the tensors are; values on other devices are moved there.
    """

    #: The name of the reduction.
    reduce: Reduce

    def __init__(self, device: torch.device) -> None:
        self._device, self._dtype = device, precise(device)
        #: Whether it was logged since the last `clear`, perhaps with padding only; and the number of values that counted.
        self.touched, self.count = False, 0

    def add(self, value: float | Tensor, weight: float | Tensor) -> None:
        """Add a value that counts."""
        raise NotImplementedError

    def clear(self) -> None:
        """Begin the next interval."""
        self.__init__(self._device)  # type: ignore[misc]

    def snapshot(self) -> Accumulator:
        """Return a copy, which later values do not change."""
        copied = copy.copy(self)
        vars(copied).update((name, copy.copy(part)) for name, part in vars(self).items() if isinstance(part, Total))
        return copied

    def restore(self) -> Accumulator:
        """Return this `snapshot` as the one to continue from."""
        return self

    def tensors(self) -> list[Tensor]:
        """Return the tensors whose values :meth:`held` takes."""
        return []

    def held(self, values: Sequence[float]) -> Held:
        """Return what this rank has, given the values of :meth:`tensors`."""
        raise NotImplementedError

    @staticmethod
    def reduced(ranks: Sequence[Held]) -> float | None:
        """Return the value over ranks, each of which has different data; None for no value."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what was added, as plain data."""
        raise NotImplementedError

    def load(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state`."""
        raise NotImplementedError

    def merge(self, other: Accumulator) -> None:
        """Add what another rank had."""
        value, count = other.held([tensor.item() for tensor in other.tensors()])
        if count:
            self.add(value, 1.0)
            self.count += int(count) - 1

    def prepared(self, tensor: Tensor) -> Tensor:
        """Return a scalar tensor in the dtype of `precise`, without its graph."""
        tensor = tensor.detach()
        if type(tensor) is not Tensor:
            tensor = full(tensor)
        if tensor.dim():
            tensor = tensor.reshape(())
        if tensor.device != self._device:
            tensor = tensor.to(self._device, non_blocking=self._device.type == "cuda")
        return tensor if tensor.dtype is self._dtype else tensor.to(self._dtype)


class Mean(Accumulator):
    """The mean, weighted by samples or by the given weights."""

    reduce = "mean"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._values, self._weights = Total(), Total()

    def add(self, value: float | Tensor, weight: float | Tensor) -> None:
        if type(weight) is float:
            self._values.add(value if type(value) is float else self.prepared(value), weight)  # type: ignore[arg-type]
            self._weights.add(weight)
            self.count += 1
            return
        weight = self.prepared(weight)  # type: ignore[arg-type]
        value = weight.new_full((), value) if type(value) is float else self.prepared(value)  # type: ignore[arg-type]
        # A mean over nothing, such as over labels that are all ignored, is NaN and must not count.
        self._values.add(torch.where(weight != 0, value, 0.0) * weight)
        self._weights.add(weight)
        self.count += 1

    def tensors(self) -> list[Tensor]:
        return [*self._values.tensors(), *self._weights.tensors()]

    def held(self, values: Sequence[float]) -> Held:
        split = len(self._values.tensors())
        return self._values.read(values[:split]), self._weights.read(values[split:])

    @staticmethod
    def reduced(ranks: Sequence[Held]) -> float | None:
        weight = added(weight for _, weight in ranks)
        return added(value for value, _ in ranks) / weight if weight else None

    def state(self) -> dict[str, Any]:
        return {"values": self._values.state(), "weights": self._weights.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._values.load(state["values"], self._device)
        self._weights.load(state["weights"], self._device)

    def merge(self, other: Accumulator) -> None:
        value, weight = other.held([tensor.item() for tensor in other.tensors()])
        self._values.add(value)
        self._weights.add(weight)


class Sum(Accumulator):
    """The sum of all values."""

    reduce = "sum"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._values = Total()

    def add(self, value: float | Tensor, weight: float | Tensor) -> None:
        self._values.add(value if type(value) is float else self.prepared(value))  # type: ignore[arg-type]
        self.count += 1

    def tensors(self) -> list[Tensor]:
        return self._values.tensors()

    def held(self, values: Sequence[float]) -> Held:
        return self._values.read(values), self.count

    def state(self) -> dict[str, Any]:
        return {"values": self._values.state(), "count": self.count}

    def load(self, state: Mapping[str, Any]) -> None:
        self._values.load(state["values"], self._device)
        self.count = state["count"]

    @staticmethod
    def reduced(ranks: Sequence[Held]) -> float | None:
        return added(value for value, count in ranks if count) if any(count for _, count in ranks) else None


class _Extreme(Accumulator):
    """The smallest or largest value; NaN if any value is."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._number: float | None = None
        self._tensor: Tensor | None = None

    #: Of tensors and of numbers; the latter without NaN.
    _of_tensors: Callable[[Tensor, Tensor], Tensor]
    _of_numbers: Callable[..., float]

    @classmethod
    def _of(cls, numbers: Iterable[float]) -> float:
        numbers = list(numbers)
        return math.nan if any(map(math.isnan, numbers)) else cls._of_numbers(numbers)

    def add(self, value: float | Tensor, weight: float | Tensor) -> None:
        self.count += 1
        if type(value) is float:
            self._number = value if self._number is None else self._of((self._number, value))
        else:
            value = self.prepared(value)  # type: ignore[arg-type]
            self._tensor = value.clone() if self._tensor is None else self._of_tensors(self._tensor, value)

    def tensors(self) -> list[Tensor]:
        return [] if self._tensor is None else [self._tensor]

    def held(self, values: Sequence[float]) -> Held:
        numbers = [*values, *([] if self._number is None else [self._number])]
        return (self._of(numbers) if numbers else 0.0), self.count

    def state(self) -> dict[str, Any]:
        return {"number": self._number, "tensor": self._tensor, "count": self.count}

    def load(self, state: Mapping[str, Any]) -> None:
        tensor, self._number, self.count = state["tensor"], state["number"], state["count"]
        self._tensor = None if tensor is None else tensor.to(self._device, self._dtype)

    @classmethod
    def reduced(cls, ranks: Sequence[Held]) -> float | None:
        values = [value for value, count in ranks if count]
        return cls._of(values) if values else None


class Min(_Extreme):
    """The smallest value."""

    reduce = "min"
    _of_tensors, _of_numbers = staticmethod(torch.minimum), staticmethod(min)


class Max(_Extreme):
    """The largest value."""

    reduce = "max"
    _of_tensors, _of_numbers = staticmethod(torch.maximum), staticmethod(max)


class Last(_Extreme):
    """The last value; over ranks that of the first one which has any."""

    reduce = "last"

    def add(self, value: float | Tensor, weight: float | Tensor) -> None:
        self.count += 1
        self._number = self._tensor = None
        if type(value) is float:
            self._number = value
        else:
            self._tensor = self.prepared(value).clone()  # type: ignore[arg-type]

    @classmethod
    def _of(cls, numbers: Iterable[float]) -> float:
        return next(iter(numbers))


#: Those of numbers, by the name of the reduction.
ACCUMULATORS: dict[str, type[Accumulator]] = {kind.reduce: kind for kind in (Mean, Sum, Min, Max, Last)}


def added(numbers: Iterable[float]) -> float:
    """Return the sum, rounded once; infinities and NaN as in plain addition."""
    numbers = list(numbers)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
