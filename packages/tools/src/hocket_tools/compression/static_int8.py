"""int8 with calibrated activations: torchao's quantization of an exported graph (PT2E), with the quantizer of the CPU."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket_tools.compression.libraries import torchao
from hocket_tools.compression.model_inputs import Inputs, leaves
from hocket_tools.tracing import exported_program


class StaticInt8(nn.Module):
    """A quantized graph. It has no training mode: dropout and batch norm are those of evaluation."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs for inputs as those of the model; they may have any batch size."""
        return self.graph(*args, **kwargs)

    def train(self, mode: bool = True) -> StaticInt8:
        """Stay in eval mode, in which the graph was exported."""
        if mode:
            raise WrongValue(
                "A model that is quantized to int8-static cannot be trained. Train before you quantize it."
            )
        return self


def static_int8(model: nn.Module, calibration: Sequence[Inputs]) -> StaticInt8:
    """Return the quantized graph of a model in eval mode.

    Raises:
        ValueError: there is no calibration batch of two samples, or one that is not finite or that the model cannot compute;
            or `torch.export` fails, with its reason.
    """
    for number, inputs in enumerate(calibration):
        if not all(leaf.isfinite().all() for leaf in leaves(inputs)):
            raise WrongValue(
                f"Batch {number} of «calibration=» has non-finite values. Give batches without NaN and Inf."
            )
    example = next(
        (inputs for inputs in calibration if all(len(leaf) > 1 for leaf in leaves(inputs) if leaf.dim())), None
    )
    if example is None:
        raise WrongValue(
            f"«calibration=» has {len(calibration)} batches, of which none has two samples: give a list of a few batches of "
            "inputs, of two samples or more each."
        )
    try:
        with torch.no_grad():
            model(*example.args, **example.kwargs)
    except Exception as error:
        raise WrongValue(
            f"{type(model).__name__} cannot compute a batch of «calibration=»: {type(error).__name__}: {error}. A tuple "
            "is positional arguments: of pairs of inputs and labels give the inputs, «calibration=[inputs for inputs, _ in …]»."
        ) from error
    pt2e = torchao("quantization.pt2e.quantize_pt2e")
    with torch.no_grad():
        prepared = pt2e.prepare_pt2e(exported(model, example), _quantizer())
        for args, kwargs in calibration:
            prepared(*args, **kwargs)
        graph = pt2e.convert_pt2e(prepared)
    _drop_unused_tensors(graph)
    return StaticInt8(graph)


def exported(model: nn.Module, example: Inputs) -> nn.Module:
    """Return the graph of a model by `torch.export`, for any batch size.

    Raises:
        ValueError: the model cannot be exported; the first line of torch's reason is in the message.
    """

    def any_batch_size(leaf: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None

    args, kwargs = torch.utils._pytree.tree_map(any_batch_size, tuple(example))
    try:
        # strict: the quantizer finds residual connections by the calls that it records.
        program = exported_program(model, example.args, example.kwargs, _shapes(model, args, kwargs), strict=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise WrongValue(
            f"{type(model).__name__} cannot be quantized to int8-static, because torch.export fails on it: {reason} Remove "
            "what depends on values from its forward, or quantize to 'int8', which needs no export."
        ) from error
    return program.module()


def _shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the dynamic shapes by the names of the arguments, as `torch.export` wants them if there are keywords."""
    if not kwargs:
        return args
    import inspect

    names = list(inspect.signature(model.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _quantizer() -> Any:
    """Return torchao's quantizer for the CPU of this machine, whose kernels inductor has."""
    arm = platform.machine().lower() in ("arm64", "aarch64")
    module = torchao(f"quantization.pt2e.quantizer.{'arm' if arm else 'x86'}_inductor_quantizer")
    if arm:
        return module.ArmInductorQuantizer().set_global(module.get_default_arm_inductor_quantization_config())
    # Without these instructions, sums of two products of 8 bits overflow 16 bits.
    config = module.get_default_x86_inductor_quantization_config(reduce_range=not torch.cpu._is_vnni_supported())
    return module.X86InductorQuantizer().set_global(config)


def _drop_unused_tensors(graph: Any) -> None:
    """Delete the float weights that int8 ones have replaced, which convert_pt2e leaves in the state dict."""
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph.named_parameters(), *graph.named_buffers()]:
        if name not in used:
            owner, _, last = name.rpartition(".")
            delattr(graph.get_submodule(owner), last)
    graph.delete_all_unused_submodules()
