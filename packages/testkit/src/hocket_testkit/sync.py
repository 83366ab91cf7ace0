"""Check that code never waits for the device, on machines with and without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hocket.errors import WrongState

#: Operations whose result, or its shape, the host must read.
_WAITING = {
    "aten::_local_scalar_dense": "item(), float(), int(), bool() or an `if`",
    "aten::allclose": "torch.allclose",
    "aten::equal": "torch.equal",
    "aten::is_nonzero": "bool() or an `if`",
    "aten::nonzero": "nonzero() or torch.where with one argument",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::bincount": "bincount",
}
#: Methods that read on the host; for tensors on the CPU, without an operation that a dispatcher would see.
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu, Tensor.__repr__}
_MOVING = {Tensor.to, Tensor.cuda}
_MAKING = {torch.tensor, torch.as_tensor, torch.asarray}
#: Set on tensors that were made inside a guard from host memory only.
_MARK = "_hocket_on_host"


class SynchronisationError(WrongState):
    """Raised when an operation would make the host wait for the device."""


class _Guard:
    """The ``guard`` of ``with no_sync() as guard``."""

    def __init__(self, simulate: bool) -> None:
        self._simulate = simulate
        self._allowed = 0

    @contextmanager
    def allow(self) -> Iterator[None]:
        """Allow waiting inside, as in a logging interval or an evaluation."""
        self._allowed += 1
        try:
            yield
        finally:
            self._allowed -= 1

    def on_device(self, tensor: Tensor) -> bool:
        if tensor.device.type not in ("cpu", "meta"):
            return True
        return self._simulate and tensor.device.type == "cpu" and not getattr(tensor, _MARK, False)

    def stands(self, device: Any) -> bool:
        """Whether ``device`` stands for the device, not the host."""
        return torch.device(device).type != "cpu" or self._simulate

    def refuse(self, what: str) -> None:
        if not self._allowed:
            raise SynchronisationError(
                f"{what} would make the host wait for the device here. Keep the value in a tensor: state.log() takes "
                "tensors as they are, torch.where replaces an `if`. Where waiting is meant, such as once per logging "
                "interval, write `with guard.allow():`, with the guard of `with hocket.testkit.no_sync() as guard:`."
            )


@contextmanager
def no_sync(simulate: bool | None = None) -> Iterator[_Guard]:
    """Raise SynchronisationError inside for operations that make the host wait for the device; ``guard.allow()`` permits them.

    Args:
        simulate: whether tensors on the CPU stand for tensors on a device; None: if torch finds no accelerator. Then existing
            tensors count as the device's, and so do results computed from them. Tensors made inside from scratch (random
            numbers of a CPU generator) are the host's, until ``.to(device)``.

    Detects ``item()``, ``tolist()``, ``numpy()``, ``cpu()``, ``float()``, ``int()``, ``bool()`` and `if` of a tensor,
    printing one, ``torch.equal``, ``torch.allclose``, ``nonzero``, ``unique``, ``masked_select``, ``bincount``, indexing with
    a mask or with indices on the CPU, ``torch.tensor(…, device=…)`` of what is not on the device, and copies from or to the CPU
    that are not ``non_blocking``. Of the calling thread only, and not inside compiled code.

    Example:
        >>> import torch
        >>> from hocket_testkit import no_sync
        >>> loss = torch.ones(())
        >>> with no_sync(simulate=True):
        ...     scaled = loss * 2  # loss.item() would raise SynchronisationError
    """
    guard = _Guard(not torch.accelerator.is_available() if simulate is None else simulate)
    with ExitStack() as stack:
        stack.enter_context(_Operations(guard))
        stack.enter_context(_Methods(guard))
        yield guard


class _Methods(TorchFunctionMode):
    """Intercept the methods that are called on tensors."""

    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READING and self._guard.on_device(args[0]):
            self._guard.refuse(f"Tensor.{func.__name__}()")
        if func in _MAKING and kwargs.get("device") not in (None, "cpu"):
            data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
            if not (isinstance(data, Tensor) and self._guard.on_device(data)) and self._guard.stands(kwargs["device"]):
                self._guard.refuse(f"torch.{func.__name__}(…, device={str(kwargs['device'])!r}), a copy from the CPU,")
        if func in _MOVING:
            where = kwargs.get("device", args[1] if len(args) > 1 else None)
            where = "cuda" if func is Tensor.cuda and where is None else where
            # A literal "cpu" means the host; `state.device` may happen to be the CPU.
            if where == "cpu" and isinstance(where, str) and self._guard.on_device(args[0]):
                self._guard.refuse("Tensor.to('cpu')")
            if isinstance(where, Tensor) and self._guard.on_device(where):
                where = where.device
            if where is None or isinstance(where, torch.dtype | Tensor) or where == "cpu":
                return func(*args, **kwargs)
            non_blocking = kwargs.get("non_blocking", any(each is True for each in args[2:]))
            if not non_blocking and self._guard.stands(where) and not self._guard.on_device(args[0]):
                self._guard.refuse(
                    f"Tensor.{func.__name__}({str(where)!r}) of a tensor on the CPU without non_blocking=True"
                )
            moved = func(*args, **kwargs)
            setattr(moved, _MARK, False)
            return moved
        result = func(*args, **kwargs)
        if kwargs.get("device") not in (None, "cpu"):  # made where it is needed
            for tensor in _tensors(result):
                setattr(tensor, _MARK, False)
        return result


class _Operations(TorchDispatchMode):
    """Intercept executed operations, including those inside of other operations and of the backward pass."""

    def __init__(self, guard: _Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        # A tensor that torch.tensor() makes from Python numbers is new, although it arrives as an existing one.
        device = func._schema.name != "aten::lift_fresh" and any(map(self._guard.on_device, given))
        if device or func._schema.name == "aten::_to_copy":
            self._check(func._schema.name, args, kwargs)
        result = func(*args, **kwargs)
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        ]
        for tensor in (*_tensors(result), *written):
            setattr(tensor, _MARK, not device)
        return result

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        if name in _WAITING:
            self._guard.refuse(f"{_WAITING[name]} ({name})")
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self._guard.refuse("repeat_interleave without output_size")
        elif name in ("aten::index", "aten::index_put", "aten::index_put_"):
            # One value for all of a mask needs no count.
            single = name != "aten::index" and args[2].numel() == 1
            if not single and any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1])):
                self._guard.refuse(f"Indexing with a mask ({name})")
            if self._guard.on_device(args[0]) and not all(map(self._guard.on_device, _tensors(args[1]))):
                self._guard.refuse(f"Indexing with indices on the CPU ({name}), which are copied to the device,")
        elif name == "aten::_to_copy":
            self._check_copy(args[0], kwargs.get("device"), kwargs.get("non_blocking"))
        elif name == "aten::copy_":
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self._check_copy(args[1], args[0].device, non_blocking)
            if self._guard.on_device(args[0]) and not self._guard.on_device(args[1]) and not non_blocking:
                self._guard.refuse("copy_() of a tensor on the CPU that is not non_blocking")

    def _check_copy(self, source: Tensor, to: Any, non_blocking: bool | None) -> None:
        if to is None or non_blocking:
            return
        kind = torch.device(to).type
        if kind != source.device.type and "cpu" in (kind, source.device.type):
            self._guard.refuse(f"A copy from {source.device} to {to} that is not non_blocking")


def _tensors(nested: Any) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
