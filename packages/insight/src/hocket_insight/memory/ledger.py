"""Record when tensors get and lose their memory, on tensors with storage or without."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hocket.errors import WrongState

_TORCH = str(Path(torch.__file__).parent)


def _of_convolution(
    output: Tensor, input: Tensor, weight: Tensor, bias: Any, stride: list[int], padding: Any, dilation: Any,
    transposed: bool, *_: Any
) -> int:  # fmt: skip
    """Copies of input and weight for a convolution by oneDNN, then of its output; a transposed one has another of that."""
    if _channels_last(input, weight):
        return weight.nbytes
    inputs, half = input.nbytes + weight.nbytes, input.itemsize < 4
    if transposed and max(stride) == 1 and not half:
        return inputs + output.nbytes
    return max(inputs, output.nbytes * (2 if transposed or half else 1))


def _of_its_backward(_: Any, gradient: Tensor, input: Tensor, weight: Tensor, *__: Any) -> int:
    return weight.nbytes if _channels_last(input, weight) else gradient.nbytes + input.nbytes


def _channels_last(*tensors: Tensor) -> bool:
    """Whether oneDNN computes in the layout of a tensor, so that it copies only weights."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return any(
        each.dim() in formats and each.is_contiguous(memory_format=formats[each.dim()]) and not each.is_contiguous()
        for each in tensors
    )


#: Bytes that a kernel takes on the CPU beside its results while it runs: gloo copies the full tensor of a collective, oneDNN
#: the operands of convolutions, in layouts of its own. Observed with torch's profiler.
_SCRATCH: dict[str, Callable[..., int]] = {
    "c10d._allgather_base_.default": lambda made, output, *_: output.nbytes,
    "c10d._reduce_scatter_base_.default": lambda made, output, input, *_: input.nbytes,
    "aten.convolution.default": _of_convolution,
    "aten.convolution_backward.default": _of_its_backward,
}


class DataDependentError(WrongState):
    """The code of a model or a loss reads the value of a tensor, and there are no values."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that a tensor got, in the order of `Ledger.events`."""

    size: int
    device: str
    #: ``forward``, ``backward``, ``step`` and so on: what ran then.
    phase: str
    #: The module whose forward ran then.
    module: str


class Ledger(TorchDispatchMode):
    """Record every allocation and release of tensors' storage while operations run.

    It sees what operations return, and what storage is resized to (FSDP frees weights so). It does not see scratch memory
    within a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        #: In order: the number of an allocation, and whether its memory was allocated or freed.
        self.events: list[tuple[int, bool]] = []
        self.phase = "setup"
        self.module = ""
        #: Whether an operation ran whose scratch memory is large and unknown: a layer of an LSTM on the CPU.
        self.recurrent = False
        #: By the id of living storage: the number of its latest allocation.
        self._living: dict[int, int] = {}

    # --- what happens

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record the storage of its results."""
        if function is torch.ops.aten._local_scalar_dense.default and _is_fake(args[0]):
            return self._read(function, args)
        given = [each for each in tree_iter(args) if isinstance(each, Tensor)]
        self.see(filter(_is_fake, given))
        # Real tensors that were made before are the data of the loader. What is made of them is recorded, but not their views.
        fresh = function is torch.ops.aten.lift_fresh.default  # a number just became a tensor
        real = [each for each in given if not fresh and not _is_fake(each)]
        data = [storage for each in real for storage in _storages(each) if id(storage) not in self._living]
        self.recurrent |= function.overloadpacket is torch.ops.aten.mkldnn_rnn_layer
        made = function(*args, **(kwargs or {}))
        found = [each for each in tree_iter(made) if isinstance(each, Tensor)]
        self.see(each for each in found if not any(s in data for s in _storages(each)))
        if function.overloadpacket is torch.ops.aten.all and _is_fake(made):
            made._of_all = True
        if (scratch := _SCRATCH.get(str(function))) is not None and args[0].device.type == "cpu":
            number = len(self.allocations)
            self.allocations.append(Allocation(scratch(made, *args), "cpu", self.phase, self.module))
            self.events += [(number, True), (number, False)]
        return made

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Record the storage of tensors, unless it is known."""
        for tensor in tensors:
            device = tensor.device.type
            for storage in _storages(tensor):
                if id(storage) not in self._living:
                    weakref.finalize(storage, self._free, id(storage)).atexit = False
                    self._allocate(id(storage), storage.nbytes(), device)

    def _allocate(self, key: int, size: int, device: str) -> None:
        self._living[key] = len(self.allocations)
        self.events.append((len(self.allocations), True))
        self.allocations.append(Allocation(size, device, self.phase, self.module))

    def _free(self, key: int) -> None:
        self.events.append((self._living.pop(key), False))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        number = self._living.get(id(storage))
        if number is not None and (before := self.allocations[number]).size != storage.nbytes():
            self.events.append((number, False))
            self._allocate(id(storage), storage.nbytes(), before.device)

    def _read(self, function: Any, args: Any) -> Any:
        """Return a value to hocket, which checks losses, weights and averages, as if all is well; refuse others."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame is not None and re.match(r"hocket(_\w+)?(\.|$)", frame.f_globals.get("__name__", "")):
            well = getattr(args[0], "_of_all", False)
            return 1.0 if args[0].is_floating_point() else well if args[0].dtype is torch.bool else 1
        where = "" if frame is None else f" in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        raise DataDependentError(
            f"The value of a tensor is read{where}, by .item(), bool() or a comparison, so that what is computed depends on "
            "values, which an estimate does not have."
        )

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Record the resizing of storage inside the context, which no operation does."""
        resize = torch.UntypedStorage.resize_

        def recorded(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = recorded  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    # --- what was recorded

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the latest allocations of living tensors."""
        return {self._living[id(s)] for each in tensors for s in _storages(each) if id(s) in self._living}

    def peak(self, device: str) -> tuple[int, int, set[int]]:
        """Return the most bytes at once on a kind of device, the allocation that reached them, and those alive then."""
        now, most, position = 0, 0, 0
        for at, (number, allocated) in enumerate(self.events):
            each = self.allocations[number]
            if each.device == device:
                now += each.size if allocated else -each.size
                if now > most:
                    most, position = now, at
        alive: set[int] = set()
        for number, allocated in self.events[: position + 1]:
            if self.allocations[number].device == device:
                (alive.add if allocated else alive.discard)(number)
        return most, self.events[position][0], alive


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if hasattr(type(tensor), "__tensor_flatten__"):  # a DTensor, or another tensor of tensors
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from _storages(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def _is_fake(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) and tensor.constant is None
