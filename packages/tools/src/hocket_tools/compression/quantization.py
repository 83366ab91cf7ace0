"""Post-training quantization by torchao: int8 with dynamic or static activations, and int4 weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket.help import warn
from hocket_tools.arguments import check_weights, checked
from hocket_tools.compression.libraries import torchao
from hocket_tools.compression.model_inputs import as_inputs, on_device_of

#: ``"int8"``: int8 weights by output channel, activations quantized by token as they come. ``"int8-static"``: the same weights,
#: activations in uint8 with ranges from calibration; also convolutions. ``"int4"``: int4 weights by group of input features.
Kind = Literal["int8", "int8-static", "int4"]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Numbers of input features that torchao's int4 kernels take as a group.
GroupSize = Literal[32, 64, 128]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@checked
def quantize(
    model: nn.Module, to: Kind = "int8-static", calibration: Iterable[Any] | None = None, *, group_size: GroupSize = 32
) -> nn.Module:
    """Return a quantized copy of ``model`` in eval mode, for inference; ``model`` is not changed.

    By torchao. ``"int8"`` and ``"int4"`` replace the weights of each `torch.nn.Linear`, and of transformers' `Conv1D`.
    ``"int8-static"`` exports the model by `torch.export`, folds batch norms, and quantizes linear layers and convolutions with
    their inputs (Jacob et al. 2017, arXiv 1712.05877): the result is a graph whose int8 kernels `torch.compile` selects if the
    environment has ``TORCHINDUCTOR_FREEZING=1``; not compiled, it computes the same numbers in float32, and is not faster.
    Layers of a model trained by `hocket_tools.QuantizationAwareTraining` are converted back first.

    Args:
        model: any module; for ``"int8-static"`` one that `torch.export` exports.
        to: ``"int8"``, ``"int8-static"`` or ``"int4"``.
        calibration: for ``"int8-static"``, inputs of the model as in training, at least one batch of two samples or more: a
            tensor, a tuple of positional arguments or a dict of keyword arguments each.
        group_size: for ``"int4"``, input features with a common scale: 32, 64 or 128.

    Raises:
        ValueError: an argument is unknown or missing, the model has no layer that this kind quantizes, is quantized already,
            or cannot compute ``calibration``; weights or calibration are not finite; its device has no kernels for it, or
            `torch.export` cannot export it.
        hocket.errors.MissingPackage: torchao is not installed.

    Example:
        >>> import torch, hocket_tools
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        >>> small = hocket_tools.quantize(model, "int8")
        >>> x = torch.randn(8, 64)
        >>> bool((small(x) - model(x)).abs().max() < 0.05)
        True
    """
    if isinstance(calibration, Tensor | Mapping) or (calibration is not None and to != "int8-static"):
        raise WrongValue(
            f"quantize was given a {type(calibration).__name__} as «calibration=» and «to={to!r}». Calibration is a list of "
            "batches, «calibration=[inputs]», for «to='int8-static'» only; omit it for others."
        )
    check_group_size(to, group_size)
    check(model, to, calibrated=calibration is not None, group_size=group_size)
    from hocket_tools.compression.quantization_aware_training import without_fake_quantization

    quantized = without_fake_quantization(copy.deepcopy(model)).eval()
    for name, linear in _linears(quantized).items():
        if quantized.get_submodule(name) is not linear:
            linear.weight.data = linear.weight.data.contiguous()
            quantized.set_submodule(name, linear)
    if to == "int8-static":
        from hocket_tools.compression.static_int8 import static_int8

        return static_int8(quantized, [on_device_of(model, as_inputs(batch)) for batch in calibration or ()])
    quantized.requires_grad_(False)
    quantization = torchao("quantization")
    if to == "int8":
        config = quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
        wanted = list(_linears(quantized))
    else:
        # The stable Int4WeightOnlyConfig has no kernels for CPUs in torchao 0.18; these are torch's own.
        int4 = torchao("prototype.quantization.int4")
        config = int4.PrototypeInt4WeightOnlyConfig(group_size=group_size, set_inductor_config=False)
        wanted = [name for name in _linears(quantized) if not misfits_int4(quantized.get_submodule(name), group_size)]
    quantization.quantize_(quantized, config, filter_fn=lambda module, name: name in wanted)
    _say_what_stays(quantized, to, wanted)
    return quantized


def check_group_size(to: str, group_size: int) -> None:
    """Raise WrongValue for a size of groups that has no effect, because only int4 has groups."""
    if to != "int4" and group_size != 32:
        raise WrongValue(
            f"«group_size={group_size}» has no effect with «to={to!r}». Remove it, or write «to='int4'».",
            about="group_size",
        )


def check(model: nn.Module, to: str, *, calibrated: bool, group_size: int = 32) -> None:
    """Raise ValueError if `quantize` cannot do this, before any work."""
    from hocket_tools.compression.static_int8 import StaticInt8

    parameters = dict(model.named_parameters())
    if any(isinstance(each, StaticInt8) for each in model.modules()) or any(
        type(each).__module__.startswith("torchao.") for each in parameters.values()
    ):
        raise WrongValue(f"{type(model).__name__} is quantized already. Give the model that it was made of.")
    check_weights(model)
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if to != "int8" and devices - {"cpu"}:
        raise WrongValue(
            f"{to} has kernels for CPUs here, and {type(model).__name__} is on {', '.join(sorted(devices))}. Move it by "
            "model.cpu() first, or quantize to 'int8'."
        )
    linears = list(_linears(model).values())
    convolutions = any(isinstance(module, _CONVOLUTIONS) for module in model.modules())
    if to == "int8-static":
        if not calibrated:
            raise WrongValue(
                "int8-static takes the ranges of activations from inputs, and got none. Give «calibration=», a list of a few "
                "batches of inputs from the training data; or quantize to 'int8', which needs none."
            )
        if not linears and not convolutions:
            raise WrongValue(
                f"{type(model).__name__} has no Linear and no convolution, so nothing would be quantized. Give one that has."
            )
        return
    if not linears:
        raise WrongValue(
            f"{to} quantizes the weights of torch.nn.Linear, and {type(model).__name__} has none. Quantize "
            + ("to 'int8-static', which is for convolutions too." if convolutions else "a model with linear layers.")
        )
    if to == "int4" and (obstacles := [misfits_int4(each, group_size) for each in linears]) and all(obstacles):
        raise WrongValue(f"int4 fits no Linear of {type(model).__name__}: {obstacles[0]}. Quantize to 'int8'.")


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by name, which are those whose subclasses multiply by ``weight`` as torch's do.

    Transformers' `Conv1D`, which GPT-2 has, is a linear layer whose weight is transposed: it is returned as a `torch.nn.Linear`
    that shares its weight.
    """
    from hocket_tools.compression.quantization_aware_training import FakeQuantized

    linears = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
            linears[name] = nn.Linear(module.weight.shape[0], module.weight.shape[1], device="meta")
            linears[name].weight, linears[name].bias = nn.Parameter(module.weight.detach().t()), module.bias
        elif isinstance(module, nn.Linear) and (
            type(module) is nn.Linear or isinstance(module, FakeQuantized) or "Linear" in type(module).__name__
        ):
            linears[name] = module
    return linears


def misfits_int4(linear: Any, group_size: int) -> str:
    """Return why torch's int4 kernel cannot take a layer, or an empty string."""
    if linear.in_features % group_size:
        return f"{linear.in_features} input features are no multiple of group_size={group_size}"
    if linear.out_features % 16:
        return f"{linear.out_features} output features are no multiple of 16"
    return ""


def _say_what_stays(model: nn.Module, to: str, wanted: Iterable[str]) -> None:
    """Warn of layers that keep their floats, with their part of the model's weights, if that is more than a tenth."""
    quantized = {id(model.get_submodule(name).weight) for name in wanted}
    sizes = {id(each): each.numel() for each in model.parameters()}
    kept = sum(size for key, size in sizes.items() if key not in quantized)
    if kept > sum(sizes.values()) / 10:
        modules, floats = list(model.modules()), sizes.keys() - quantized
        kinds = sorted({type(module).__name__ for module in modules if id(module._parameters.get("weight")) in floats})
        convolutions = any(isinstance(module, _CONVOLUTIONS) for module in modules)
        warn(
            f"{to} quantizes linear layers only: {kept / sum(sizes.values()):.0%} of the weights of {type(model).__name__} "
            f"stay as they are, in {', '.join(kinds) or 'biases'}."
            + (" Quantize to 'int8-static' for convolutions." if convolutions else "")
        )
