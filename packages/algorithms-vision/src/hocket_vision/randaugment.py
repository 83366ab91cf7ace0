"""RandAugment: a few random operations in a row on each image, all of one strength.

Source: Cubuk, Zoph, Shlens and Le 2019, "RandAugment: Practical automated data augmentation with a reduced search space",
arXiv 1909.13719, section 3 and figure 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from hocket.basics.time import Time
from hocket.errors import WrongValue
from hocket_vision.augmentation import Augmentation, AugmentationAlgorithm, check_settings
from hocket_vision.image_operations import AugmentationSet, draw_layers, operate

if TYPE_CHECKING:
    from PIL.Image import Image

ImageT = TypeVar("ImageT", Tensor, "Image")
Magnitude = Literal["constant", "random"]


def randaugment(
    images: ImageT,
    severity: float = 9,
    depth: int = 2,
    augmentation_set: AugmentationSet = "original",
    magnitude: Magnitude = "constant",
    *,
    generator: torch.Generator | None = None,
) -> ImageT:
    """Apply ``depth`` operations to each image, each drawn uniformly from the set and the identity.

    The paper's N is ``depth`` and its M is ``severity`` (arXiv 1909.13719, figure 2). Each image of a batch has draws of its
    own, and the batch is computed on its device.

    Args:
        images: one image or a batch before normalization: PIL (L or RGB), or tensor ``(C, H, W)`` or ``(B, C, H, W)`` of 1
            or 3 channels, uint8, or floating point in [0, 1].
        severity: strength of the operations, 0 to 10; see :func:`hocket_vision.image_operations.draw_layers`.
        depth: operations in a row, at least 1.
        augmentation_set: ``"original"`` (the paper's 13 operations besides the identity), ``"safe"`` (9 operations on
            geometry and tone), ``"all"`` (factors of colour, contrast, brightness and sharpness up to ``severity``) or
            ``"tone"`` (``"original"`` without geometry).
        magnitude: ``"constant"``, every strength is that of ``severity``; or ``"random"``, up to it.
        generator: source of randomness; torch's default generator if None.

    Returns:
        New images of the same kind, size and dtype.

    Raises:
        ValueError: for arguments out of range, other shapes, or floating-point pixels outside [0, 1].
        TypeError: for something that is neither a PIL image nor such a tensor.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import randaugment
        >>> images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
        >>> randaugment(images, severity=9, depth=2).shape, randaugment(images[0]).shape
        (torch.Size([8, 3, 32, 32]), torch.Size([3, 32, 32]))
    """
    augmented: ImageT = _augmentation(severity, depth, augmentation_set, magnitude)(images, generator=generator)
    return augmented


class RandAugment(AugmentationAlgorithm):
    """Apply a few random operations of one strength to each training image (Cubuk et al. 2019, arXiv 1909.13719).

    Acts on samples where they are loaded: before the image becomes a tensor in a ``torchvision`` dataset, on ``input_key``
    of a sample of any other map-style dataset; see :func:`hocket_vision.per_sample.apply_per_sample`. With ``batch``, acts on
    each batch ``(B, C, H, W)`` on ``after_dataloader``, on the run's device, to which it moves the batch.

    Args:
        severity, depth, augmentation_set, magnitude: see :func:`randaugment`.
        batch: whether to augment whole batches instead of samples.
        start, stop: when to begin and to end, such as ``"0.9dur"``, with ``batch`` only; see `hocket.Span`.
        input_key: where the images are in a batch, or in a sample; None for the Trainer's ``inputs``, or index 0.

    Raises:
        ValueError: for arguments out of range, or ``start`` or ``stop`` without ``batch``. Later, for targets that are pictures
            of the images, such as masks, unless ``augmentation_set`` is ``"tone"``.
        TypeError: later, without ``batch``, for training data that is not a DataLoader over a map-style dataset.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> trainer = hocket.Trainer(
        ...     model=hocket_vision.small_resnet(), loss=torch.nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     train_data=[(torch.rand(4, 1, 8, 8), torch.arange(4))],
        ...     algorithms=[hocket_vision.RandAugment(batch=True)], device="cpu",
        ... )
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        severity: float = 9,
        depth: int = 2,
        augmentation_set: AugmentationSet = "original",
        magnitude: Magnitude = "constant",
        batch: bool = False,
        start: str | Time | None = None,
        stop: str | Time | None = None,
        input_key: Any = None,
    ) -> None:
        super().__init__(_augmentation(severity, depth, augmentation_set, magnitude), batch, start, stop, input_key)


def _augmentation(severity: float, depth: int, augmentation_set: str, magnitude: str) -> Augmentation:
    check_settings(severity, augmentation_set, "The paper uses 9 for ResNet-50 on ImageNet.")
    if depth < 1:
        raise WrongValue(f"depth is the number of operations in a row and must be at least 1, but is {depth}.")
    if magnitude not in ("constant", "random"):
        raise WrongValue(f"magnitude must be 'constant' or 'random', but is {magnitude!r}.")
    settings = {
        "severity": severity,
        "depth": depth,
        "augmentation_set": augmentation_set,
        "constant": magnitude == "constant",
    }
    return Augmentation("RandAugment", _randaugment, settings)


def _randaugment(
    images: Tensor,
    severity: float,
    depth: int,
    augmentation_set: str,
    constant: bool,
    generator: torch.Generator | None,
) -> Tensor:
    augmented = images.clone()
    layers = draw_layers(
        depth, images, augmentation_set, severity, identity=True, constant=constant, generator=generator
    )
    for layer in layers:
        operate(augmented, layer)
    return augmented
