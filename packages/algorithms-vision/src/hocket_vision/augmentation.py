"""What AugMix and RandAugment share: the kinds of image that they take, and where in a run they act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from hocket.basics.time import Time
from hocket.data import map_tensors, move
from hocket.errors import WrongType, WrongValue
from hocket.hookspecs import Event
from hocket.state.batch_part import BatchPart
from hocket_vision.colout import is_picture_of
from hocket_vision.image_operations import AUGMENTATION_SETS, OPERATIONS
from hocket_vision.memory_format import in_format_of
from hocket_vision.per_sample import SampleOrBatchAlgorithm

if TYPE_CHECKING:
    from hocket.state.state import State


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
            out = in_format_of(out, batch)
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
                raise WrongType(
                    f"{self.name} takes a PIL image, a (C, H, W) or a (B, C, H, W) tensor, but was given "
                    f"{type(images).__name__}."
                )
            if mode not in ("L", "RGB"):
                raise WrongValue(
                    f"{self.name} takes PIL images of mode L or RGB, but was given {mode}. Try image.convert('RGB')."
                )
            return
        if images.dim() not in (3, 4) or images.shape[-3] not in (1, 3):
            raise WrongValue(
                f"{self.name} takes images of 1 or 3 channels, (C, H, W) or (B, C, H, W), but was given shape "
                f"{tuple(images.shape)}. Channels come before height and width. Remove {self.name} if these are not images."
            )
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise WrongType(f"{self.name} takes tensors of uint8 or floating point, but was given {images.dtype}.")
        if check_range and images.is_floating_point() and images.numel():
            low, high = images.amin(), images.amax()
            if not (low >= 0 and high <= 1):
                raise WrongValue(
                    f"{self.name} takes floating-point images in [0, 1], but was given {low:.3g} to {high:.3g}. Apply it "
                    "before normalization, or normalize in the model."
                )


class AugmentationAlgorithm(SampleOrBatchAlgorithm):
    """Base of algorithms that augment each training image: where samples are loaded, or a whole batch on the run's device."""

    def __init__(
        self,
        augmentation: Augmentation,
        batch: bool,
        start: str | Time | None,
        stop: str | Time | None,
        input_key: Any,
    ) -> None:
        name = augmentation.name.lower()
        super().__init__(name, batch, start, stop, input_key)
        self.events = {*self.events, Event.AFTER_DATALOADER}  # type: ignore[misc]
        self.augmentation = augmentation
        self._checked = False
        self._targets = BatchPart(name, "target")
        names = AUGMENTATION_SETS[augmentation.settings["augmentation_set"]]
        self._moving = [name for name in names if OPERATIONS[name].matrix is not None]

    def match(self, event: Event, state: State) -> bool:
        """Whether to act; targets are looked at before ``start``, too."""
        return event is Event.AFTER_DATALOADER or super().match(event, state)

    def apply(self, event: Event, state: State) -> None:
        """Transform the batch, or each sample as it is loaded. Raises ValueError for targets that are masks or the like."""
        if event is Event.AFTER_DATALOADER and self._moving:
            self._refuse_pictures(state)
        if self._span.includes(state) and (self.batch or event is not Event.AFTER_DATALOADER):
            super().apply(event, state)

    def sample_transform(self, state: State) -> tuple[Augmentation, Any]:
        """Augment the image of each sample, which is where the images of a batch are."""
        return self.augmentation, self._images.place(state)

    def transform_batch(self, state: State) -> None:
        """Move the batch to the device and augment its images."""
        state.batch = move(state.batch, state.device)
        images = self._images.of(state)
        if isinstance(images, Tensor) and images.dim() != 4:
            raise WrongValue(
                f"{self.augmentation.name} takes a batch of images (B, C, H, W), but was given inputs of shape "
                f"{tuple(images.shape)}. Say where the images are with input_key=, or remove it if the inputs are not images."
            )
        # Looking at the pixels on another device would wait for it in every step.
        look = not self._checked or not isinstance(images, Tensor) or images.is_cpu
        generator = state.generator(self, per_rank=True)
        state.batch = self._images.put(state, self.augmentation(images, generator=generator, check_range=look))
        self._checked = True

    def _refuse_pictures(self, state: State) -> None:
        """Raise ValueError if operations move pixels and targets are pictures of the images, which would stay as they are."""
        try:
            images, targets = self._images.of(state), self._targets.of(state)
        except KeyError:  # a batch without targets, or one that only the task can read
            return
        if isinstance(images, list | tuple) and isinstance(targets, list | tuple) and images and targets:
            images, targets = images[0], targets[0]  # of different sizes
        if not isinstance(images, Tensor) or images.dim() not in (3, 4):
            return
        pictures: list[Tensor] = []
        map_tensors(lambda tensor: pictures.append(tensor) if is_picture_of(tensor, images) else None, targets)
        if pictures:
            name = self.augmentation.name
            raise WrongValue(
                f"{name} moves pixels of the images ({', '.join(self._moving)}), and does not move those of the targets, "
                f"which are pictures of them: images have the shape {tuple(images.shape)}, targets {tuple(pictures[0].shape)}. "
                f"Choose operations that leave pixels where they are: {{'{name.lower()}': {{'augmentation_set': 'tone'}}}}. "
                "Or remove it, and move images and targets together in the data set, such as with torchvision.transforms.v2."
            )


def check_settings(severity: float, augmentation_set: str, advice: str) -> None:
    """Raise ValueError for a severity outside 0 to 10 or an unknown augmentation set."""
    if not 0 <= severity <= 10:
        raise WrongValue(f"severity must be between 0 and 10, but is {severity}. {advice}")
    if augmentation_set not in AUGMENTATION_SETS:
        raise WrongValue(
            f"augmentation_set must be one of {', '.join(AUGMENTATION_SETS)}, but is {augmentation_set!r}."
        )
