"""CutMix: replace a box of each image by that of another image.

Source: Yun et al. 2019, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", arXiv
1905.04899, section 3.1.
"""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor

from hocket.basics.time import Time
from hocket.data.mixture import Mixture
from hocket_vision.boxes import check_images, draw_boxes
from hocket_vision.colout import is_picture_of
from hocket_vision.mixing import Mixer, check_alpha, draw_partners, draw_share, take_partners

#: Top, bottom, left and right of a box; bottom and right are exclusive.
Box = tuple[int, int, int, int]


def cutmix_box(
    height: int, width: int, share: float, *, uniform_sampling: bool = False, generator: torch.Generator | None = None
) -> Box:
    """Draw a box of ``1 - share`` of an image's area, with the image's proportions (Yun et al. 2019, equation 2).

    It is centred on a random pixel and clipped at the borders.

    Example:
        >>> from hocket_vision.cutmix import cutmix_box
        >>> top, bottom, left, right = cutmix_box(32, 32, share=0.75)
        >>> max(bottom - top, right - left) <= 16
        True
    """
    side = math.sqrt(1 - share)
    boxes = draw_boxes(
        height, width, int(height * side), int(width * side), 1, uniform_sampling=uniform_sampling, generator=generator
    )
    top, bottom, left, right = boxes[0].tolist()
    return top, bottom, left, right


def paste(images: Tensor, partners: Tensor, box: Box) -> Tensor:
    """Return a copy of ``images`` ``(B, ..., H, W)`` with the box of ``images[partners]``."""
    top, bottom, left, right = box
    pasted = images.clone()
    pasted[..., top:bottom, left:right] = images[..., top:bottom, left:right].index_select(
        0, partners.to(images.device, non_blocking=True)
    )
    return pasted


@overload
def cutmix(
    images: Tensor,
    targets: None = None,
    alpha: float = 1.0,
    *,
    uniform_sampling: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor: ...


@overload
def cutmix(
    images: Tensor,
    targets: Any,
    alpha: float = 1.0,
    *,
    uniform_sampling: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Any]: ...


def cutmix(
    images: Tensor,
    targets: Any = None,
    alpha: float = 1.0,
    *,
    uniform_sampling: bool = False,
    generator: torch.Generator | None = None,
) -> Any:
    """Replace a box of each image by that of another image of the batch (Yun et al. 2019, arXiv 1905.04899, section 3.1).

    One box is drawn for the batch: its area is ``1 - λ`` of the image, where λ has the distribution ``Beta(alpha, alpha)``.

    Args:
        images: ``(B, C, H, W)`` or ``(B, H, W)``, of any dtype.
        targets: anything with one entry for each sample. Pictures of the images, tensors that end in their ``H, W``
            and have the same number of dimensions or one less (masks), get the same box pasted instead.
        alpha: 0 or more; at 0 nothing is pasted, at 1 all areas are equally likely.
        uniform_sampling: let the box's centre be outside of the image, so that each pixel is replaced with the same
            probability.
        generator: source of randomness; torch's default generator if None.

    Returns:
        The mixed images, a new tensor; or, if targets were given, those and the `hocket.data.Mixture` of the targets, whose
        share is the fraction of the pixels that stayed, or the new pictures.

    Raises:
        ValueError: ``alpha`` is negative.
        TypeError: ``images`` are not a batch of images.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import cutmix
        >>> images, targets = cutmix(torch.rand(8, 3, 16, 16), torch.arange(8) % 3)
        >>> loss = targets.loss(torch.nn.functional.cross_entropy, torch.randn(8, 3))
    """
    check_alpha(alpha)
    height, width = check_images("cutmix", images).shape[-2:]
    share = draw_share(alpha, generator)
    box = cutmix_box(height, width, share, uniform_sampling=uniform_sampling, generator=generator)
    partners = draw_partners(len(images), generator)
    mixed = paste(images, partners, box)
    if targets is None:
        return mixed
    if is_picture_of(targets, images):
        return mixed, paste(targets, partners, box)
    top, bottom, left, right = box
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, Mixture(targets, take_partners(targets, partners), kept)


class CutMix(Mixer):
    """Train on images with a box of another image (Yun et al. 2019, arXiv 1905.04899).

    Mixes the batch of each rank on ``after_dataloader``; see :func:`cutmix`. The loss is the mixture of the losses for both
    targets, by area, for any loss function of outputs and targets. Metrics of training get the targets of the image around
    the box.

    Args:
        alpha: parameter of the Beta distribution of the area that stays.
        uniform_sampling: let the box's centre be outside of the image.
        start, stop: when to begin and to end, such as ``"0.9dur"``; see `hocket.Span`.
        input_key, target_key: where images and targets are in a batch; None for those of the Trainer, or 0 and 1.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> trainer = hocket.Trainer(
        ...     model=hocket_vision.small_resnet(), loss=torch.nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     train_data=[(torch.rand(4, 1, 8, 8), torch.arange(4))], algorithms=[hocket_vision.CutMix()], device="cpu",
        ... )
        >>> result = trainer.fit()
    """

    called = "cutmix"
    conflicts = ("mixup",)

    def __init__(
        self,
        alpha: float = 1.0,
        uniform_sampling: bool = False,
        start: str | Time | None = None,
        stop: str | Time | None = None,
        input_key: Any = None,
        target_key: Any = None,
    ) -> None:
        super().__init__(alpha, start, stop, input_key, target_key)
        self.uniform_sampling = uniform_sampling

    def mix(self, inputs: Any, targets: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """See :func:`cutmix`."""
        return cutmix(inputs, targets, self.alpha, uniform_sampling=self.uniform_sampling, generator=generator)
