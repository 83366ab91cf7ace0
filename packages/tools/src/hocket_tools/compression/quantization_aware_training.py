"""Quantization-aware training: train with the rounding errors of the quantized model.

Source: Jacob et al. 2017, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
section 3, arXiv 1712.05877.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket import surgery
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket_tools.arguments import checked
from hocket_tools.compression.libraries import torchao
from hocket_tools.compression.quantization import GroupSize, Kind, check_group_size, misfits_int4

if TYPE_CHECKING:
    from hocket.state.state import State


def fake_quantized_weight(weight: Tensor) -> Tensor:
    """Return a weight rounded to int8 by output channel, in floats; the gradient passes the rounding (Jacob et al., eq. 12).

    ``(out, ...) -> (out, ...)``, with ``scale = max|w| / 127.5`` of each ``weight[i]``, as torchao's observers choose it.
    Batch norm scales output channels, and so does this: folding it into the weight first gives the same.

    Example:
        >>> import torch
        >>> from hocket_tools.compression.quantization_aware_training import fake_quantized_weight
        >>> fake_quantized_weight(torch.tensor([[-127.5, 1.2, 0.4]]))
        tensor([[-128.,    1.,    0.]])
    """
    wide = weight.float()
    scale = (wide.detach().abs().flatten(1).amax(1) / 127.5).clamp_min(torch.finfo(torch.float32).eps)
    rounded = torch.fake_quantize_per_channel_affine(
        wide, scale, torch.zeros_like(scale, dtype=torch.int32), 0, -128, 127
    )
    return rounded.to(weight.dtype)


class FakeQuantized(nn.Module):
    """A layer whose input and weight are rounded to 8 bits: the input by token, or in a range that follows training batches."""

    #: Torchao's, which holds the range; None for a range by token.
    input_quantizer: Any

    def rounded(self, input: Tensor) -> Tensor:
        """Return the input rounded to int8 by token, or to uint8 of a moving range, which only training moves."""
        quantizer = self.input_quantizer
        if quantizer is None:
            return fake_quantized_weight(input.flatten(0, -2)).view_as(input)
        wide = input.float()
        if self.training:
            out: Tensor = quantizer(wide)
            return out.to(input.dtype)
        # Not the quantizer's own forward, which would move the range. Before the first training batch there is none.
        quantized = torch.fake_quantize_per_tensor_affine(
            wide, quantizer.scale, quantizer.zero_point, quantizer.quant_min, quantizer.quant_max
        )
        return torch.where(quantizer.activation_post_process.min_val.isinf(), wide, quantized).to(input.dtype)


class FakeQuantizedLinear(FakeQuantized, nn.Linear):
    """`torch.nn.Linear`, fake-quantized."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.rounded(input), fake_quantized_weight(self.weight), self.bias)


class _FakeQuantizedConv(FakeQuantized):
    _conv_forward: Any

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        out: Tensor = self._conv_forward(self.rounded(input), fake_quantized_weight(layer.weight), layer.bias)
        return out


class FakeQuantizedConv1d(_FakeQuantizedConv, nn.Conv1d):
    """`torch.nn.Conv1d`, fake-quantized."""


class FakeQuantizedConv2d(_FakeQuantizedConv, nn.Conv2d):
    """`torch.nn.Conv2d`, fake-quantized."""


_KINDS: dict[type[nn.Module], type[FakeQuantized]] = {
    nn.Linear: FakeQuantizedLinear,
    nn.Conv1d: FakeQuantizedConv1d,
    nn.Conv2d: FakeQuantizedConv2d,
}  # of which torchao's quantizers for CPUs have int8 kernels


def _input_quantizer() -> nn.Module:
    pt2e = torchao("quantization.pt2e.fake_quantize")
    # As in torchao's default configuration of quantization-aware training for these kernels.
    quantizer: nn.Module = pt2e.FusedMovingAvgObsFakeQuantize(
        quant_min=0, quant_max=255, dtype=torch.uint8, qscheme=torch.per_tensor_affine, eps=2**-12
    )
    return quantizer


def _build(old: Any, to: Kind, group_size: int) -> nn.Module:
    """Return the fake-quantized replacement of a layer, with the same parameters."""
    if to != "int4":
        new = surgery.recast(old, _KINDS[type(old)])
        new.input_quantizer = _input_quantizer() if to == "int8-static" else None
        return new
    qat, quantization = torchao("quantization.qat"), torchao("quantization")
    # With a minimum and a scale by group, as torch's int4 kernels have.
    config = qat.IntxFakeQuantizeConfig(
        torch.int4,  # type: ignore[attr-defined]
        group_size=group_size,
        is_symmetric=False,
        zero_point_precision=torch.float32,
        zero_point_domain=quantization.ZeroPointDomain.FLOAT,
    )
    replacement: nn.Module = qat.FakeQuantizedLinear.from_linear(old, None, config)
    return replacement


def _policies(model: nn.Module, to: Kind, group_size: int) -> surgery.Policies:
    kinds = tuple(_KINDS) if to == "int8-static" else (nn.Linear,)

    def wants(module: Any) -> bool:
        return type(module) in kinds and (to != "int4" or not misfits_int4(module, group_size))

    return {nn.Module: surgery.Policy(lambda old, index: _build(old, to, group_size), wants)}


@checked
def fake_quantize(
    model: nn.Module, to: Kind = "int8-static", *, group_size: GroupSize = 32
) -> tuple[nn.Module, list[surgery.Replacement]]:
    """Replace layers of ``model`` by ones that round as the quantized model will, in place; the parameters stay the same.

    After training, ``hocket_tools.quantize(model, to, …)`` converts them.

    Args:
        to: the quantization to train for; ``"int8-static"`` replaces `Linear`, `Conv1d` and `Conv2d`, the others `Linear` only.
        group_size: for ``"int4"``, as in `hocket_tools.quantize`.

    Returns:
        The model and a record of each replacement; the list is empty if nothing matched, with a NoEffectWarning.

    Raises:
        ValueError: ``to`` is unknown, or ``group_size`` none that int4 takes.
        hocket.errors.MissingPackage: torchao is not installed.

    Example:
        >>> import torch, hocket_tools
        >>> model, changed = hocket_tools.fake_quantize(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()))
        >>> str(changed[0])
        '0: Conv2d -> FakeQuantizedConv2d'
    """
    check_group_size(to, group_size)
    replacements = surgery.replace_modules(model, _policies(model, to, group_size))
    if not replacements:
        layers = "Linear, Conv1d or Conv2d" if to == "int8-static" else "Linear"
        applied = {name: part for name, part in model.named_modules() if isinstance(part, FakeQuantized)}
        misfits = [misfits_int4(part, group_size) for part in model.modules() if type(part) is nn.Linear]
        reason = f"of its Linear, {misfits[0]}" if misfits else f"it has no {layers} of torch's own class"
        lacking = f"{reason}. Choose another «to=», or train without it."
        warn(surgery.why_no_effect("quantization-aware-training", model, lacking, applied), surgery.NoEffectWarning)
    return model, replacements


def without_fake_quantization(model: nn.Module) -> nn.Module:
    """Make the layers of `fake_quantize` torch's own again, in place, and return the model."""
    for module in [each for each in model.modules() if isinstance(each, FakeQuantized)]:
        del module.input_quantizer
        module.__class__ = next(kind for kind, fake in _KINDS.items() if type(module) is fake)  # type: ignore[assignment]
    if any(type(module).__module__.startswith("torchao.quantization.qat") for module in model.modules()):
        config = torchao("quantization.qat").QATConfig(step="convert")
        torchao("quantization").quantize_(model, config)
    return model


class QuantizationAwareTraining(Algorithm):
    """Train with the rounding of the quantized model (Jacob et al. 2017, section 3, arXiv 1712.05877), by torchao's quantizers.

    Replaces layers of the model, once, before optimizers exist; parameters, and so optimizers, averages and strategies, are
    those of the model without it. In training and evaluation the weights, and for ``"int8-static"`` and ``"int8"`` the inputs,
    of these layers are rounded; gradients pass the rounding. The ranges of inputs are buffers of the model, which checkpoints
    save. Afterwards `hocket_tools.quantize` makes the small model. Start from a trained model, with a small learning rate.

    Args:
        to: ``"int8-static"``, ``"int8"`` or ``"int4"``, as in `hocket_tools.quantize`.
        group_size: for ``"int4"``, input features with a common scale: 32, 64 or 128.

    Raises:
        ValueError: ``to`` is unknown, or ``group_size`` none that int4 takes. MissingPackage: later, without torchao.

    Example:
        >>> import hocket, hocket_tools, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        >>> data = [(torch.randn(8, 4), torch.randn(8, 1))] * 10
        >>> trainer = hocket.Trainer(
        ...     model=model, loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     train_data=data, algorithms=[hocket_tools.QuantizationAwareTraining()],
        ... )
        >>> result = trainer.fit()
        >>> small = hocket_tools.quantize(model, "int8-static", calibration=[inputs for inputs, _ in data])
    """

    events = {Event.INIT}
    phase = Phase.PRECISION  # after surgery that replaces layers by its own
    conflicts = ("weight-standardization",)

    @checked
    def __init__(self, to: Kind = "int8-static", group_size: GroupSize = 32) -> None:
        check_group_size(to, group_size)
        self.to, self.group_size = to, group_size

    def apply(self, event: Event, state: State) -> None:
        """Replace the layers."""
        _, changed = fake_quantize(state.model, self.to, group_size=self.group_size)
        state.replacements += changed
        state.log({"quantization-aware-training/modules": len(changed)})

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each layer that would be replaced."""
        names = surgery.preview(model, _policies(model, self.to, self.group_size))
        return [f"{name}: {type(model.get_submodule(name)).__name__} rounded to {self.to}" for name in names]
