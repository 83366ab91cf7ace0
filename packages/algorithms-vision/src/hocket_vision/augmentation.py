"""What AugMix and RandAugment share: the kinds of image that they take, and where in a run they act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from hocket.algorithm import Algorithm, Phase
from hocket.data import BatchPart
from hocket.hookspecs import Event
from hocket_vision.operations import AUGMENTATION_SETS
from hocket_vision.per_sample import PER_SAMPLE_EVENTS, apply_per_sample

if TYPE_CHECKING:
    from hocket.state import State


@dataclass(frozen=True)
class Augmentation:
    """A function of a batch, for a PIL image, a tensor ``(C, H, W)`` or a batch ``(B, C, H, W)``.

    ``function(images, **settings, generator=...)`` is given uint8, float32 or float64 of 1 or 3 channels, which it does not
    change, and returns a new tensor of that shape and dtype.
    """

    name: str
    function: Callable[..., Tensor]
    settings: dict[str, Any]

    def __call__(self, images: Any, *, generator: torch.Generator | None = None, check_range: bool = True) -> Any:
        """Return new images of the same kind. ``check_range=False`` does not look at the pixels of floating-point images."""
        self._check(images, check_range)
        pixels = images if isinstance(images, Tensor) else F.pil_to_tensor(images)
        batch = pixels.as_subclass(Tensor).detach()[(None,) * (4 - pixels.dim())]
        if batch.numel():
            wide = batch.dtype if batch.dtype in (torch.uint8, torch.float64) else torch.float32
            out = self.function(batch.to(wide).contiguous(), **self.settings, generator=generator).to(batch.dtype)
            if batch.is_contiguous(memory_format=torch.channels_last) and not batch.is_contiguous():
                out = out.contiguous(memory_format=torch.channels_last)
        else:
            out = batch.clone()
        if not isinstance(images, Tensor):
            return F.to_pil_image(out[0], mode=images.mode)
        out = out.view(images.shape) if images.dim() == 3 else out
        return tv_tensors.wrap(out, like=images) if isinstance(images, tv_tensors.TVTensor) else out

    def _check(self, images: Any, check_range: bool) -> None:
        if not isinstance(images, Tensor):
            mode = getattr(images, "mode", None)
            if mode is None:
                raise TypeError(
                    f"{self.name} takes a PIL image, a (C, H, W) or a (B, C, H, W) tensor, but was given "
                    f"{type(images).__name__}."
                )
            if mode not in ("L", "RGB"):
                raise ValueError(
                    f"{self.name} takes PIL images of mode L or RGB, but was given {mode}. Try image.convert('RGB')."
                )
            return
        if images.dim() not in (3, 4) or images.shape[-3] not in (1, 3):
            raise ValueError(
                f"{self.name} takes images of 1 or 3 channels, (C, H, W) or (B, C, H, W), but was given shape "
                f"{tuple(images.shape)}. Channels come before height and width. Remove {self.name} if these are not images."
            )
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise TypeError(f"{self.name} takes tensors of uint8 or floating point, but was given {images.dtype}.")
        if check_range and images.is_floating_point() and images.numel():
            low, high = images.amin(), images.amax()
            if not (low >= 0 and high <= 1):
                raise ValueError(
                    f"{self.name} takes floating-point images in [0, 1], but was given {low:.3g} to {high:.3g}. Apply it "
                    "before normalization, or normalize in the model."
                )


class AugmentationAlgorithm(Algorithm):
    """Base of algorithms that augment each training image: where samples are loaded, or a whole batch on its device."""

    phase = Phase.DATA

    def __init__(self, augmentation: Augmentation, batch: bool, input_key: Any) -> None:
        self.augmentation = augmentation
        self.batch = batch
        self.input_key = input_key
        self.events = {Event.AFTER_DATALOADER} if batch else PER_SAMPLE_EVENTS  # type: ignore[misc]
        self._images = BatchPart(augmentation.name.lower(), "input", input_key)
        self._checked = False

    def apply(self, event: Event, state: State) -> None:
        """Augment the batch, or the samples of this fit."""
        if not self.batch:
            apply_per_sample(self, event, state, self.augmentation, 0 if self.input_key is None else self.input_key)
            return
        images = self._images.of(state)
        if isinstance(images, Tensor) and images.dim() != 4:
            raise ValueError(
                f"{self.augmentation.name} takes a batch of images (B, C, H, W), but was given inputs of shape "
                f"{tuple(images.shape)}. Say where the images are with input_key=, or remove it if the inputs are not images."
            )
        # Looking at the pixels on another device would wait for it in every step.
        look = not self._checked or not isinstance(images, Tensor) or images.is_cpu
        generator = state.generator(self, per_rank=True)
        state.batch = self._images.put(state, self.augmentation(images, generator=generator, check_range=look))
        self._checked = True


def check_settings(severity: float, augmentation_set: str, advice: str) -> None:
    """Raise ValueError for a severity outside 0 to 10 or an unknown augmentation set."""
    if not 0 <= severity <= 10:
        raise ValueError(f"severity must be between 0 and 10, but is {severity}. {advice}")
    if augmentation_set not in AUGMENTATION_SETS:
        raise ValueError(
            f"augmentation_set must be one of {', '.join(AUGMENTATION_SETS)}, but is {augmentation_set!r}."
        )
