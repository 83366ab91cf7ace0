"""Find the lines of a step that make the host wait for the device, also on a machine without one."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.help.ours import PARTS

#: Functions whose result the host has to read.
_READING: dict[Any, str] = {
    Tensor.item: ".item()", Tensor.tolist: ".tolist()", Tensor.numpy: ".numpy()", Tensor.cpu: ".cpu()",
    Tensor.__array__: "numpy.array()", Tensor.__bool__: "bool() or an `if`", Tensor.__float__: "float()",
    Tensor.__int__: "int()", Tensor.__index__: "an index", Tensor.__repr__: "printing", Tensor.__format__: "printing",
    Tensor.__contains__: "`in`", Tensor.is_nonzero: "is_nonzero()", torch.is_nonzero: "is_nonzero()",
    Tensor.nonzero: ".nonzero()", torch.nonzero: "nonzero()", torch.argwhere: "argwhere()", Tensor.argwhere: "argwhere()",
    Tensor.equal: ".equal()", torch.equal: "torch.equal()", Tensor.allclose: ".allclose()",
    torch.allclose: "torch.allclose()", Tensor.unique: ".unique()", torch.unique: "torch.unique()",
    Tensor.masked_select: ".masked_select()", torch.masked_select: "masked_select()",
    Tensor.bincount: ".bincount()", torch.bincount: "bincount()",
}  # fmt: skip
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_TORCH = os.path.dirname(torch.__file__) + os.sep


class Wait(NamedTuple):
    """A line that makes the host wait."""

    file: str
    line: int
    function: str
    call: str


class Waits(TorchFunctionMode):
    """Count, by line, the calls that make the host wait for the device, of code outside of torch and hocket's core.

    It sees the functions of torch that Python calls, and changes nothing about them. Without an accelerator, all tensors count
    as the device's, except those that were made in between from host memory only, such as a draw of a CPU generator.
    Nothing is compiled while it watches, because torch 2.15 compiles wrongly under such a mode: it omits operations.

    Args:
        simulate: whether tensors on the CPU stand for the device's.
    """

    def __init__(self, simulate: bool) -> None:
        super().__init__()
        self._simulate = simulate
        self._on_host: Any = WeakTensorKeyDictionary()
        self._entered = False
        self._eager: Any = None
        self.found: Counter[Wait] = Counter()

    def begin(self) -> None:
        """Watch the calls of this thread from now on."""
        if not self._entered:
            self._entered = True
            self._eager = torch.compiler.set_stance("force_eager")
            self.__enter__()

    def end(self) -> None:
        """Watch no longer."""
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)
            self._eager.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = any(map(self._of_device, given))
        call = self._waits(func, args, kwargs) if device else ""
        if call and (wait := _caller(call)) is not None:
            self.found[wait] += 1
        result = func(*args, **kwargs)
        made = not given and kwargs.get("device") in (None, "cpu")
        if self._simulate and (made or (given and not device) or func is Tensor.cpu):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and not any(leaf is each for each in given):
                    self._on_host[leaf] = True
        return result

    def _of_device(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu":
            return tensor.device.type != "meta"
        return self._simulate and tensor not in self._on_host

    def _waits(self, func: Any, args: Any, kwargs: Any) -> str:
        """Return what to call a function that waits for the device, or empty."""
        if func in _READING:
            return _READING[func]
        if func in _INDEXING:
            masks = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor) and each.dtype is torch.bool]
            single = func is Tensor.__setitem__ and not (isinstance(args[2], Tensor) and args[2].numel() > 1)
            return "indexing with a mask" if masks and not single else ""
        if func is torch.where and len(args) + len(kwargs) == 1:
            return "where() of one argument"
        if func is Tensor.to:
            where = kwargs.get("device", args[1] if len(args) > 1 else None)
            # A literal "cpu" means the host; `state.device` may happen to be the CPU.
            return ".to('cpu')" if isinstance(where, str) and where == "cpu" else ""
        return ""


def _caller(call: str) -> Wait | None:
    """Return the innermost line outside of torch, or None if it is hocket's own."""
    frame = sys._getframe(2)
    # Another mode calls functions in its handler, such as the one that checks the first loss of a fit.
    while frame is not None and (
        frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] in PARTS.values():
        return None
    code = frame.f_code
    return Wait(code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name), call)
