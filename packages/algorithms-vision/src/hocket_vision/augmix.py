"""AugMix: mix an image with several randomly augmented versions of itself.

Source: Hendrycks et al. 2020, "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty",
arXiv 1912.02781, algorithm 1 (without the Jensen-Shannon loss of its section 3).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hocket.basics.time import Time
from hocket.errors import WrongValue
from hocket_vision.augmentation import Augmentation, AugmentationAlgorithm, check_settings
from hocket_vision.image_operations import AugmentationSet, draw_layers, operate, part_of
from hocket_vision.kernels import to_dtype

if TYPE_CHECKING:
    from PIL.Image import Image

ImageT = TypeVar("ImageT", Tensor, "Image")


def mix_chains(images: Tensor, chains: Tensor, weights: Tensor, m: Tensor) -> Tensor:
    """Return ``(1 - m) · images + m · Σ weights[k] · chains[k]`` (arXiv 1912.02781, algorithm 1, line 15).

    Args:
        images: ``(B, C, H, W)``, uint8 or floating point. Integers are rounded to the nearest.
        chains: ``(K, B, C, H, W)``, augmented versions of ``images``.
        weights: ``(K, B)``; they should sum to 1 over K.
        m: ``(B,)``, fraction of the mixture in the result, 0 to 1.
    """
    floating = images.is_floating_point()
    dtype = images.dtype if floating else torch.float32
    shares = torch.cat(((1 - m)[None], m * weights)).to(images.device, dtype, non_blocking=True)[..., None, None, None]
    mixed = torch.empty_like(images)
    few = part_of(images)
    for start in range(0, len(images), few):
        part = slice(start, start + few)
        total = shares[0, part] * images[part].to(dtype)
        for chain, share in zip(chains, shares[1:], strict=True):
            total.addcmul_(chain[part].to(dtype), share[part])
        mixed[part] = to_dtype(total if floating else total.add_(0.5), images.dtype)
    return mixed


def augmix(
    images: ImageT,
    severity: float = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: AugmentationSet = "safe",
    *,
    generator: torch.Generator | None = None,
) -> ImageT:
    """Mix each image with ``width`` randomly augmented versions of itself.

    Weights of the versions are ``Dirichlet(alpha, …, alpha)``, the fraction of their mixture is ``Beta(alpha, alpha)``
    (arXiv 1912.02781, section 3). Each image of a batch has draws of its own, and the batch is computed on its device.

    Args:
        images: one image or a batch before normalization: PIL (L or RGB), or tensor ``(C, H, W)`` or ``(B, C, H, W)`` of 1
            or 3 channels, uint8, or floating point in [0, 1].
        severity: strength of the augmentations, 0 to 10; see :func:`hocket_vision.image_operations.draw_layers`.
        depth: augmentations in a row per version; -1 draws 1, 2 or 3 for each version.
        width: number of augmented versions.
        alpha: above 0; large values mix evenly, small ones pick one version.
        augmentation_set: ``"safe"``, the paper's 9 operations on geometry and tone, none of which is a corruption of
            ImageNet-C; ``"all"`` (and colour, contrast, brightness and sharpness in both directions), ``"original"``
            (those four as in the paper's code, mostly downwards), or ``"tone"`` (``"original"`` without geometry).
        generator: source of randomness; torch's default generator if None.

    Returns:
        New images of the same kind, size and dtype.

    Raises:
        ValueError: for arguments out of range, other shapes, or floating-point pixels outside [0, 1].
        TypeError: for something that is neither a PIL image nor such a tensor.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import augmix
        >>> images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
        >>> augmix(images, severity=3).shape, augmix(images[0]).shape
        (torch.Size([8, 3, 32, 32]), torch.Size([3, 32, 32]))
    """
    augmented: ImageT = _augmentation(severity, depth, width, alpha, augmentation_set)(images, generator=generator)
    return augmented


class AugMix(AugmentationAlgorithm):
    """Mix each training image with augmented versions of itself (Hendrycks et al. 2020, arXiv 1912.02781).

    Acts on samples where they are loaded: before the image becomes a tensor in a ``torchvision`` dataset, on ``input_key``
    of a sample of any other map-style dataset; see :func:`hocket_vision.per_sample.apply_per_sample`. With ``batch``, acts on
    each batch ``(B, C, H, W)`` on ``after_dataloader``, on the run's device, to which it moves the batch.

    Args:
        severity, depth, width, alpha, augmentation_set: see :func:`augmix`.
        batch: whether to augment whole batches instead of samples.
        start, stop: when to begin and to end, such as ``"0.9dur"``, with ``batch`` only; see `hocket.Span`.
        input_key: where the images are in a batch, or in a sample; None for the Trainer's ``inputs``, or index 0.

    Raises:
        ValueError: for arguments out of range, or ``start`` or ``stop`` without ``batch``. Later, for targets that are pictures
            of the images, such as masks, unless ``augmentation_set`` is ``"tone"``.
        TypeError: later, without ``batch``, for training data that is not a DataLoader over a map-style dataset.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> dataset = torch.utils.data.TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8))
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8)), loss=torch.nn.CrossEntropyLoss(),
        ...     train_data=torch.utils.data.DataLoader(dataset, batch_size=4), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     algorithms=[hocket_vision.AugMix(severity=3, batch=True)], device="cpu",
        ... )
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        severity: float = 3,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        augmentation_set: AugmentationSet = "safe",
        batch: bool = False,
        start: str | Time | None = None,
        stop: str | Time | None = None,
        input_key: Any = None,
    ) -> None:
        super().__init__(_augmentation(severity, depth, width, alpha, augmentation_set), batch, start, stop, input_key)


def _augmentation(severity: float, depth: int, width: int, alpha: float, augmentation_set: str) -> Augmentation:
    check_settings(severity, augmentation_set, "The paper uses 3.")
    if depth != -1 and depth < 1:
        raise WrongValue(f"depth must be at least 1, or -1 to draw 1, 2 or 3 for each version, but is {depth}.")
    if width < 1:
        raise WrongValue(f"width is the number of augmented versions and must be at least 1, but is {width}.")
    if not alpha > 0 or math.isinf(alpha):
        raise WrongValue(f"alpha must be a positive number, but is {alpha}. The paper uses 1.")
    settings = {
        "severity": severity,
        "depth": depth,
        "width": width,
        "alpha": alpha,
        "augmentation_set": augmentation_set,
    }
    return Augmentation("AugMix", _augmix, settings)


def _augmix(
    images: Tensor,
    severity: float,
    depth: int,
    width: int,
    alpha: float,
    augmentation_set: str,
    generator: torch.Generator | None,
) -> Tensor:
    count = len(images)
    weights = dirichlet(alpha, width, count, generator)
    m = dirichlet(alpha, 2, count, generator)[0]  # Beta(a, a) is the first component of Dirichlet(a, a)
    chains = images.repeat(width, 1, 1, 1)
    lengths = [depth] * len(chains)
    if depth == -1:
        device = "cpu" if generator is None else generator.device
        lengths = torch.randint(1, 4, (len(chains),), generator=generator, device=device).tolist()
    for number, layer in enumerate(draw_layers(max(lengths), chains, augmentation_set, severity, generator=generator)):
        names = [name if number < length else None for name, length in zip(layer.names, lengths, strict=True)]
        operate(chains, layer._replace(names=names))
    return mix_chains(images, chains.view(width, *images.shape), weights, m)


def dirichlet(alpha: float, size: int, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw ``count`` vectors of ``Dirichlet(alpha, …, alpha)`` with ``size`` components, as columns; float64."""
    # torch.distributions takes no generator; this is the sampler that it calls.
    device = "cpu" if generator is None else generator.device
    alphas = torch.full((count, size), alpha, dtype=torch.float64, device=device)
    shares: Tensor = torch._sample_dirichlet(alphas, generator=generator)
    return shares.t()
