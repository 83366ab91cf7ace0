"""Boxes in images, for CutOut and CutMix."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.errors import WrongType


def draw_boxes(
    height: int,
    width: int,
    box_height: int,
    box_width: int,
    count: int,
    *,
    uniform_sampling: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw boxes around random pixels, clipped to the image.

    Args:
        height, width: size of the image.
        box_height, box_width: size of the boxes before they are clipped; ``size // 2`` of it is above and left of the centre.
        count: number of boxes.
        uniform_sampling: let centres be outside of the image, so that each pixel is in a box with the same probability.

    Returns:
        An int64 tensor ``(count, 4)`` of top, bottom, left and right; bottom and right are exclusive.

    Example:
        >>> from hocket_vision.boxes import draw_boxes
        >>> draw_boxes(8, 8, 0, 0, count=3).shape
        torch.Size([3, 4])
    """
    device = "cpu" if generator is None else generator.device
    edges = []
    for size, box in ((height, box_height), (width, box_width)):
        # A centre c covers c - box // 2 up to c + (box - box // 2); those outside that still touch the image count too.
        low, high = (box // 2 - box + 1, size + box // 2) if uniform_sampling and box else (0, size)
        start = torch.randint(low, high, (count,), generator=generator, device=device) - box // 2
        edges += [start.clamp(0, size), (start + box).clamp(0, size)]
    return torch.stack(edges, 1)


def check_images(name: str, images: object) -> Tensor:
    """Return ``images``. Raises TypeError unless they are a batch of images, ``(B, C, H, W)`` or ``(B, H, W)``."""
    if isinstance(images, Tensor) and images.dim() in (3, 4):
        return images
    found = f"a tensor of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
    raise WrongType(
        f"{name} takes a batch of images as a tensor (B, C, H, W) or (B, H, W), but was given {found}. Say where the images "
        f"are in a batch with input_key=, or remove {name} if the inputs are not images."
    )
