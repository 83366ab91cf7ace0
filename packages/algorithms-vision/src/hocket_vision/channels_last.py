"""Channels-last: store weights and images with the channels of a pixel next to each other, which convolutions prefer.

Source: V. Fedyunin, "Channels Last Memory Format in PyTorch",
https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.data.nesting import map_tensors
from hocket.help import warn
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.hookspecs.needs import Need
from hocket.surgery import NoEffectWarning, Replacement

if TYPE_CHECKING:
    from hocket.state.state import State


def channels_last(model: nn.Module) -> tuple[nn.Module, list[Replacement]]:
    """Convert the four-dimensional parameters and buffers of a model to ``torch.channels_last``, in place.

    Values, shapes, parameter objects and the ``state_dict`` stay. Give the model images in that format too:
    ``images.contiguous(memory_format=torch.channels_last)``.

    Returns:
        The model and a record of each module with four-dimensional parameters, which stays: ``new`` is ``old``. The list is
        empty if there are none, with a NoEffectWarning.

    Example:
        >>> import torch
        >>> from hocket_vision import small_resnet
        >>> from hocket_vision.functional import channels_last
        >>> model, changed = channels_last(small_resnet())
        >>> changed[0].name, changed[0].new.weight.is_contiguous(memory_format=torch.channels_last)
        ('stem.0', True)
    """
    changed = [Replacement(name, module, module, model) for name, module in _found(model)]
    if not changed:
        warn(
            f"channels-last found nothing to convert in {type(model).__name__}: no parameter has four dimensions, as those of "
            "Conv2d have. Remove channels-last.",
            NoEffectWarning,
        )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:  # `model.to` would also refuse those of Conv3d
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return model, changed


class ChannelsLast(Algorithm):
    """Store weights and images in the memory format ``torch.channels_last`` (Fedyunin, PyTorch's tutorial).

    Converts the model once, after surgery by other algorithms, and every batch of training, evaluation and prediction on its
    device; tensors that have the format already are not copied. Only the memory format changes.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> model = hocket_vision.small_resnet()
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_vision.ChannelsLast()], device="cpu")
        >>> model.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
        True
    """

    events = {Event.INIT}
    phase = Phase.PRECISION  # after the surgery of MODEL, whose modules are converted too
    needs = Need.FULL_PARAMETERS  # FSDP2 shards only parameters that are contiguous, and gathers such

    def apply(self, event: Event, state: State) -> None:
        """Convert the model."""
        channels_last(state.model)

    @hookimpl(wrapper=True)
    def move_batch(self, state: State, batch: Any) -> Generator[None, Any, Any]:
        """Convert the images of the batch, where they are on the device."""
        moved = yield
        return map_tensors(_images_last, moved)

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each module whose parameters would be converted."""
        return [f"{name}: {type(module).__name__} in channels-last format" for name, module in _found(model)]


def _found(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with four-dimensional parameters of their own, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(parameter.dim() == 4 for parameter in module.parameters(recurse=False))
    ]


def _images_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4 or not (tensor.is_floating_point() or tensor.dtype is torch.uint8):
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
