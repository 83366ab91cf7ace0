"""CutOut: hide a random square of each image.

Source: DeVries and Taylor 2017, "Improved Regularization of Convolutional Neural Networks with Cutout", arXiv 1708.04552,
section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.basics.time import Time
from hocket.errors import WrongValue
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.batch_part import BatchPart
from hocket.state.span import Span
from hocket_vision.boxes import check_images, draw_boxes

if TYPE_CHECKING:
    from hocket.state.state import State


def fill_boxes(images: Tensor, boxes: Tensor, fill: float = 0.0) -> Tensor:
    """Return a copy of ``images`` ``(B, ..., H, W)`` in which the boxes ``(holes, B, 4)`` of each image are ``fill``."""
    if images.device.type == "cpu":
        filled = images.clone()
        for holes in boxes.tolist():
            for image, (top, bottom, left, right) in zip(filled, holes, strict=True):
                image[..., top:bottom, left:right] = fill
        return filled
    boxes = boxes.to(images.device, non_blocking=True)[..., None]
    rows, columns = (torch.arange(size, device=images.device) for size in images.shape[-2:])
    inside = ((rows >= boxes[:, :, 0]) & (rows < boxes[:, :, 1]))[..., None]
    inside = (inside & ((columns >= boxes[:, :, 2]) & (columns < boxes[:, :, 3]))[..., None, :]).any(0)
    return images.masked_fill(inside if images.dim() == 3 else inside.unsqueeze(1), fill)


def cutout(
    images: Tensor,
    num_holes: int = 1,
    length: float = 0.5,
    *,
    fill: float = 0.0,
    uniform_sampling: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill random squares of each image.

    Args:
        images: ``(B, C, H, W)`` or ``(B, H, W)``, of any dtype.
        num_holes: number of squares in each image; they may overlap.
        length: side of the squares as a fraction of the shorter side of the images, in ``(0, 1]``. Squares are centred on a
            pixel of the image and clipped at its borders, so that they are often smaller.
        fill: the value; 0 is the mean of normalised images.
        uniform_sampling: let centres be outside of the image too, so that each pixel is hidden with the same probability.
        generator: source of randomness; torch's default generator if None.

    Returns:
        A new tensor in the memory format of ``images``.

    Raises:
        ValueError: an argument is out of range.
        TypeError: ``images`` are not a batch of images.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import cutout
        >>> (cutout(torch.ones(2, 3, 8, 8), length=0.5, uniform_sampling=False) == 0).any()
        tensor(True)
    """
    check_arguments(num_holes, length)
    height, width = check_images("cutout", images).shape[-2:]
    side = max(1, int(min(height, width) * length))
    count = num_holes * len(images)
    boxes = draw_boxes(height, width, side, side, count, uniform_sampling=uniform_sampling, generator=generator)
    return fill_boxes(images, boxes.view(num_holes, len(images), 4), fill)


class CutOut(Algorithm):
    """Hide random squares of the training images (DeVries and Taylor 2017, arXiv 1708.04552).

    Acts on the batch of each rank on ``after_dataloader``; every image has its own squares. The arguments are those of
    :func:`cutout`.

    Args:
        start, stop: when to begin and to end, such as ``"0.1dur"``; see `hocket.Span`.
        input_key: where the images are in a batch; None for the Trainer's ``inputs``, or index 0.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> trainer = hocket.Trainer(
        ...     model=hocket_vision.small_resnet(), loss=torch.nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     train_data=[(torch.rand(4, 1, 8, 8), torch.arange(4))], algorithms=[hocket_vision.CutOut()], device="cpu",
        ... )
        >>> result = trainer.fit()
    """

    events = {Event.AFTER_DATALOADER}
    phase = Phase.DATA

    def __init__(
        self,
        num_holes: int = 1,
        length: float = 0.5,
        fill: float = 0.0,
        uniform_sampling: bool = False,
        start: str | Time | None = None,
        stop: str | Time | None = None,
        input_key: Any = None,
    ) -> None:
        check_arguments(num_holes, length)
        self.num_holes, self.length, self.fill = num_holes, length, fill
        self.uniform_sampling = uniform_sampling
        self._span = Span(start, stop)
        self._images = BatchPart("cutout", "input", input_key)

    def match(self, event: Event, state: State) -> bool:
        """Whether the current batch is between ``start`` and ``stop``."""
        return self._span.includes(state)

    def apply(self, event: Event, state: State) -> None:
        """Fill squares of the images of the batch."""
        images = cutout(
            self._images.of(state),
            self.num_holes,
            self.length,
            fill=self.fill,
            uniform_sampling=self.uniform_sampling,
            generator=state.generator(self, per_rank=True),
        )
        state.batch = self._images.put(state, images)


def check_arguments(num_holes: int, length: float) -> None:
    """Raise ValueError for invalid arguments of CutOut."""
    if num_holes < 1:
        raise WrongValue(f"num_holes is {num_holes}, but must be 1 or more. Try «num_holes=1», or remove cutout.")
    if not 0 < length <= 1:
        raise WrongValue(
            f"length is the side of the squares as a fraction of the image's and must be in (0, 1], but is {length}. For 16 of "
            "32 pixels write «length=0.5»."
        )
