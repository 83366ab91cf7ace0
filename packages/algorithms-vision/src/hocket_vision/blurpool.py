"""BlurPool: low-pass filter feature maps before they are subsampled.

Source: Zhang 2019, "Making Convolutional Networks Shift-Invariant Again", arXiv 1904.11486, section 3.2, with the
3-tap filter (``Triangle-3``). Blurring before a strided convolution rather than after it is MosaicML Composer's
variant: it costs less and helps about as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin

from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Policies, Policy, Replacement, preview, replace_modules, why_no_effect

if TYPE_CHECKING:
    from hocket.state.state import State


def blur(x: Tensor, kernel: Tensor, stride: Any = 1, padding_mode: str = "zeros") -> Tensor:
    """Filter each channel with ``kernel`` ``(1, 1, 3, 3)``, with one pixel of padding; return every ``stride``-th pixel.

    ``(..., C, H, W) -> (..., C, ceil(H / stride), ceil(W / stride))``
    """
    channels = x.shape[-3]
    weight = kernel.to(x).expand(channels, 1, 3, 3)
    if padding_mode == "zeros":
        return F.conv2d(x, weight, None, stride, padding=1, groups=channels)
    if padding_mode == "reflect" and min(x.shape[-2:]) < 2:
        padding_mode = "replicate"  # one pixel has no neighbour to reflect
    return F.conv2d(F.pad(x, (1, 1, 1, 1), padding_mode), weight, None, stride, groups=channels)


def _faster_last(x: Tensor) -> bool:
    """Whether to convert ``x`` to channels-last: torch's CPU kernels of blurs and pooling vectorise over channels.

    Both conversions included, an image's blur and convolution take half of the time, and those of 256 channels the same.
    """
    return x.device.type == "cpu" and x.dim() == 4 and x.is_contiguous()


def _register_kernel(module: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    # The kernel is constant; not persistent, so that a checkpoint loads with and without BlurPool.
    line = torch.tensor([1.0, 2.0, 1.0], device=device, dtype=dtype)
    module.register_buffer("blur_kernel", torch.outer(line, line).reshape(1, 1, 3, 3) / 16, persistent=False)


class BlurConv2d(nn.Conv2d):
    """A strided convolution that blurs: its input (``blur_first``), or its output at stride 1 before subsampling.

    Arguments, shapes, parameters and ``state_dict`` keys are those of :class:`torch.nn.Conv2d`. The blur pads as the
    convolution does (``padding_mode``). If not ``blur_first``, ``stride`` is 1 and ``blur_stride`` subsamples.

    Example:
        >>> import torch
        >>> from hocket_vision import BlurConv2d
        >>> BlurConv2d(16, 32, kernel_size=3, stride=2, padding=1)(torch.randn(1, 16, 8, 8)).shape
        torch.Size([1, 32, 4, 4])
    """

    blur_kernel: Tensor
    blur_first: bool
    blur_stride: Any

    def __init__(self, *args: Any, blur_first: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_order(blur_first)

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, blur_first: bool = True) -> BlurConv2d:
        """Return the same convolution with a blur; it has the same parameter objects. Draws no random numbers."""
        new = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            conv.bias is not None,
            conv.padding_mode,
            device="meta",
            blur_first=blur_first,
        )
        new.weight, new.bias = conv.weight, conv.bias
        _register_kernel(new, conv.weight.device, conv.weight.dtype)
        return new

    def _set_order(self, blur_first: bool) -> None:
        self.blur_first = blur_first
        self.blur_stride = (1, 1)
        if not blur_first:
            self.blur_stride, self.stride = self.stride, (1, 1)

    def reset_parameters(self) -> None:
        """Draw new weights and fill in the blur kernel, as after construction on the meta device."""
        super().reset_parameters()
        _register_kernel(self, self.weight.device, self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        if self.blur_first and self.kernel_size == (1, 1) and self.padding in ((0, 0), "valid"):
            # It reads the strided pixels only, so the others are not blurred.
            blurred = blur(input, self.blur_kernel, self.stride, self.padding_mode)
            return F.conv2d(blurred, self.weight, self.bias, groups=self.groups)
        if self.blur_first:
            converted = _faster_last(input)
            if converted:
                input = input.contiguous(memory_format=torch.channels_last)
            output = super().forward(blur(input, self.blur_kernel, 1, self.padding_mode))
            return output.contiguous() if converted else output
        return blur(super().forward(input), self.blur_kernel, self.blur_stride, self.padding_mode)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, blur_first={self.blur_first}" + (
            "" if self.blur_first else f", blur_stride={self.blur_stride}"
        )


class BlurMaxPool2d(nn.MaxPool2d):
    """Max pooling at stride 1, blurred, then subsampled by ``stride`` (arXiv 1904.11486, equation 6).

    Arguments and shapes are those of :class:`torch.nn.MaxPool2d`, ``ceil_mode`` and ``dilation`` included. The blur
    pads with zeros. Indices of the maxima mean nothing after a blur: ``return_indices=True`` raises ValueError.

    Example:
        >>> import torch
        >>> from hocket_vision import BlurMaxPool2d
        >>> BlurMaxPool2d(kernel_size=2, stride=2)(torch.randn(1, 16, 8, 8)).shape
        torch.Size([1, 16, 4, 4])
    """

    blur_kernel: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.return_indices:
            raise WrongValue("A blurred maximum has no index: use nn.MaxPool2d where «return_indices=True» is needed.")
        _register_kernel(self)

    @classmethod
    def from_maxpool(cls, pool: nn.MaxPool2d) -> BlurMaxPool2d:
        """Return the same pooling with a blur."""
        return cls(pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.return_indices, pool.ceil_mode)

    def reset_parameters(self) -> None:
        """Fill in the blur kernel, as after construction on the meta device."""
        _register_kernel(self, self.blur_kernel.device, self.blur_kernel.dtype)

    def forward(self, input: Tensor) -> Tensor:
        if self.ceil_mode:
            input = F.pad(input, self._overhang(input), value=-torch.inf)
        converted = _faster_last(input)
        if converted:
            input = input.contiguous(memory_format=torch.channels_last)
        maxima = F.max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation)
        blurred = blur(maxima, self.blur_kernel, self.stride)
        return blurred.contiguous() if converted else blurred

    def _overhang(self, x: Tensor) -> tuple[int, int, int, int]:
        """Return the pixels to pad at the right and the bottom to complete the last, partial window of ``ceil_mode``."""
        extra = []
        for axis in (0, 1):
            kernel, stride, padding, dilation = (
                value if isinstance(value, int) else value[axis]
                for value in (self.kernel_size, self.stride, self.padding, self.dilation)
            )
            size = x.shape[axis - 2]
            span = size + 2 * padding - dilation * (kernel - 1) - 1
            missing = -span % stride
            if span + missing >= size + padding:  # a window that would start outside is skipped
                missing = 0
            extra.append(missing)
        return (0, extra[1], 0, extra[0])


@dataclass(frozen=True)
class _Choice:
    """The modules to replace, and how."""

    replace_convs: bool
    replace_maxpools: bool
    blur_first: bool
    min_channels: int

    def __post_init__(self) -> None:
        if not (self.replace_convs or self.replace_maxpools):
            raise WrongValue(
                "BlurPool has nothing to replace: replace_convs and replace_maxpools are both False. Set one to True, or "
                "remove BlurPool."
            )

    def wants(self, module: nn.Module) -> bool:
        if isinstance(module, BlurConv2d | BlurMaxPool2d):
            return False
        if isinstance(module, nn.Conv2d):
            enough = isinstance(module, LazyModuleMixin) or module.in_channels >= self.min_channels
            return self.replace_convs and max(module.stride) > 1 and enough
        if isinstance(module, nn.MaxPool2d):
            stride = module.stride if isinstance(module.stride, int) else max(module.stride)
            return self.replace_maxpools and stride > 1
        return False

    def policies(self) -> Policies:
        def matches(module: nn.Module) -> bool:
            return self.wants(module) and not _obstacle(module)

        return {
            nn.Conv2d: Policy(lambda conv, index: BlurConv2d.from_conv(conv, self.blur_first), matches),
            nn.MaxPool2d: Policy(lambda pool, index: BlurMaxPool2d.from_maxpool(pool), matches),
        }


def _obstacle(module: nn.Module) -> str:
    """Return why a module cannot be replaced, or an empty string."""
    if isinstance(module, LazyModuleMixin):
        return f"{type(module).__name__}, which does not know its channels before its first batch"
    if type(module) not in (nn.Conv2d, nn.MaxPool2d):
        return f"{type(module).__name__}, whose forward may be its own"
    if isinstance(module, nn.Conv2d) and not isinstance(module.weight, nn.Parameter):
        return "its weight is computed by a hook"
    if isinstance(module, nn.MaxPool2d) and module.return_indices:
        return "return_indices=True"
    return ""


def blurpool(
    model: nn.Module,
    *,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
) -> tuple[nn.Module, list[Replacement]]:
    """Replace strided ``Conv2d`` and ``MaxPool2d`` by :class:`BlurConv2d` and :class:`BlurMaxPool2d`, in place.

    A module is replaced if its stride exceeds 1 in some direction and, for a convolution, it has at least
    ``min_channels`` input channels (so that the image itself is not blurred). Output shapes, parameters (the same
    objects: an existing optimizer still trains them), hooks and the keys of the ``state_dict`` stay. Subclasses of the
    two, which may define their own forward, and pools with ``return_indices`` are not replaced; a warning names them.

    Args:
        model: any module; only its submodules are replaced.
        replace_convs, replace_maxpools: which of the two to replace.
        blur_first: blur the input of a strided convolution; otherwise convolve at stride 1, then blur and subsample,
            which is the paper's order and costs ``stride²`` times the convolution.
        min_channels: minimum number of input channels of a convolution to replace.

    Returns:
        The model and a record of each replacement; the list is empty if nothing matched, with a NoEffectWarning.

    Raises:
        ValueError: if there is nothing to replace because both ``replace_convs`` and ``replace_maxpools`` are False.
        TypeError: if the model is wrapped in DistributedDataParallel.

    Example:
        >>> from hocket_vision import small_resnet
        >>> from hocket_vision.functional import blurpool
        >>> model, replaced = blurpool(small_resnet())
        >>> len(replaced)
        4
    """
    return model, _operate(model, _Choice(replace_convs, replace_maxpools, blur_first, min_channels))


def _operate(model: nn.Module, choice: _Choice) -> list[Replacement]:
    kept = [
        f"{name} ({obstacle})"
        for name, module in model.named_modules()
        if choice.wants(module) and (obstacle := _obstacle(module))
    ]
    if kept:
        warn(f"BlurPool does not replace these subsampling modules: {', '.join(kept)}.")
    changed = replace_modules(model, choice.policies())
    if not changed:
        lacking = (
            f"no Conv2d of at least {choice.min_channels} input channels and no MaxPool2d with a stride above 1. Lower "
            "min_channels, or remove BlurPool."
        )
        blurred = {name: part for name, part in model.named_modules() if isinstance(part, BlurConv2d | BlurMaxPool2d)}
        warn(why_no_effect("BlurPool", model, lacking, blurred), NoEffectWarning)
    return changed


class BlurPool(Algorithm):
    """Low-pass filter feature maps before they are subsampled (Zhang 2019, arXiv 1904.11486).

    Replaces strided convolutions and max pooling of the model, once, before optimizers exist. The arguments are those of
    :func:`blurpool`. Logs the number of each as ``blurpool/convs`` and ``blurpool/maxpools``.

    Example:
        >>> import hocket, hocket_vision
        >>> model = hocket_vision.small_resnet()
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_vision.BlurPool()], device="cpu")
        >>> sum(isinstance(module, hocket_vision.BlurConv2d) for module in model.modules())
        4
    """

    events = {Event.INIT}
    phase = Phase.MODEL

    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
    ) -> None:
        self._choice = _Choice(replace_convs, replace_maxpools, blur_first, min_channels)

    def apply(self, event: Event, state: State) -> None:
        """Replace modules of the model."""
        changed = _operate(state.model, self._choice)
        state.replacements += changed
        convs = sum(isinstance(replacement.new, BlurConv2d) for replacement in changed)
        state.log({"blurpool/convs": convs, "blurpool/maxpools": len(changed) - convs})

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each module that would be replaced."""
        return [
            f"{name}: {type(model.get_submodule(name)).__name__} with a blur"
            for name in preview(model, self._choice.policies())
        ]
