"""CUDA graphs of compiled code (``compile="reduce-overhead"``) overwrite what their earlier calls returned.

With ``torch.compiler.cudagraph_mark_step_begin`` instead of copies, each microbatch of a step would have a graph of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.data.nesting import map_tensors

#: Backends of torch.compile, other than inductor, that are known to return tensors of their own.
_OWN_TENSORS = {"eager", "aot_eager", "aot_eager_decomp_partition", "eager_noexcept", "ts", "onnxrt", "openxla", "tvm"}


def may_overwrite(task: nn.Module, options: Mapping[str, Any] | None, device: torch.device) -> bool:
    """Whether a call of the compiled code of a task may overwrite the results of an earlier call.

    Args:
        options: the arguments of `torch.compile` for what hocket compiles; None if it compiles nothing. Modules that the user
            has compiled are found in the task.
    """
    calls = [getattr(module, "_compiled_call_impl", None) for module in task.modules()]
    calls += [module for module in task.modules() if "get_compiler_config" in vars(module)]
    if options is not None:
        if isinstance(backend := options.get("backend", "inductor"), str) and backend in _OWN_TENSORS:
            return False
        calls.append(torch.compile(_nothing, **options))
    return any(_has_graphs(call, device) for call in calls if call is not None)


def _has_graphs(compiled: object, device: torch.device) -> bool:
    """Whether compiled code uses CUDA graphs; also True for backends that do not say it."""
    config = compiled.get_compiler_config() if hasattr(compiled, "get_compiler_config") else None
    return device.type == "cuda" and bool(config["triton.cudagraphs"]) if config else True


def _nothing() -> None:
    pass


def copied(values: object) -> Any:
    """Return copies of all tensors, with their gradients."""
    return map_tensors(torch.clone, values)


def keep_gradients(parameters: Iterable[nn.Parameter], kept: dict[int, Tensor]) -> None:
    """Copy the gradients that a backward pass has made, because the next one would overwrite them before it adds to them.

    Args:
        kept: the copies so far, by the parameter's id, in which backward passes accumulate.
    """
    for parameter in parameters:
        if parameter.grad is not None and kept.get(id(parameter)) is not parameter.grad:
            parameter.grad = kept[id(parameter)] = parameter.grad.clone()
