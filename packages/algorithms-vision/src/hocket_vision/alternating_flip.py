"""Alternating flip: in every two successive epochs, show each image once as it is and once mirrored.

Source: Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv 2404.00498, section 3.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.basics.time import Time
from hocket.data.items import part, set_item
from hocket.errors import WrongValue
from hocket.state.batch_part import BatchPart
from hocket_vision.boxes import check_images
from hocket_vision.colout import is_picture_of, size_of, take
from hocket_vision.per_sample import SampleOrBatchAlgorithm, is_pil, only_images, part_of_sample, targets_of

if TYPE_CHECKING:
    from hocket.state.state import State


def flip_choices(indices: Tensor, epoch: int, seed: int = 0) -> Tensor:
    """Return whether the samples with these indices are mirrored in an epoch: random in epoch 0, then alternating.

    A function of its arguments alone, so that it does not depend on batches, ranks, workers or interruptions.

    Args:
        indices: int64, of any shape.

    Returns:
        A bool tensor of the same shape, on the same device.

    Example:
        >>> import torch
        >>> from hocket_vision.alternating_flip import flip_choices
        >>> first, second = (flip_choices(torch.arange(100), epoch) for epoch in (0, 1))
        >>> bool((first != second).all())
        True
    """
    # splitmix64 (Steele et al. 2014), with arithmetic shifts; products wrap around.
    x = indices.long() * -7046029254386353131 + (seed * 7046029254386353131 + 2**63) % 2**64 - 2**63
    for factor in (-4658895280553007687, -7723592293110705685):
        x = (x ^ (x >> 29)) * factor
    return ((x >> 40) + epoch) % 2 == 1


def alternating_flip(images: Tensor, indices: Tensor, epoch: int, seed: int = 0) -> Tensor:
    """Mirror the images whose turn it is in this epoch; see :func:`flip_choices`.

    Args:
        images: ``(B, C, H, W)`` or ``(B, H, W)``, of any dtype.
        indices: int64 ``(B,)``, the indices of the samples in the data set.
        epoch: the number of the epoch, from 0.
        seed: decides which images are mirrored in epoch 0.

    Returns:
        A new tensor in the memory format of ``images``.

    Raises:
        ValueError: the number of ``indices`` is not that of the images.
        TypeError: ``images`` are not a batch of images.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import alternating_flip
        >>> images, indices = torch.rand(8, 3, 4, 4), torch.arange(8)
        >>> first, second = (alternating_flip(images, indices, epoch) for epoch in (0, 1))
        >>> torch.equal(first, second.flip(-1))
        True
    """
    check_images("alternating_flip", images)
    if indices.shape != images.shape[:1]:
        raise WrongValue(
            f"There are indices of shape {tuple(indices.shape)} for {len(images)} images. Give one index in the data set "
            "for each image."
        )
    choices = flip_choices(indices.to(images.device, non_blocking=True), epoch, seed)
    return torch.where(choices.view(-1, *[1] * (images.dim() - 1)), images.flip(-1), images)


class AlternatingFlip(SampleOrBatchAlgorithm):
    """Mirror random images in the first epoch and the others in the next, alternately (Jordan 2024, arXiv 2404.00498).

    A random flip shows an image the same way in two successive epochs half of the time; here every two epochs show all
    2N images of the data set. Use it in the place of a random horizontal flip, not beside one.

    The choice is a function of the seed, the epoch and the index of the sample in the data set. Samples are mirrored where they
    are loaded, in a DataLoader over a map-style data set; see `hocket_vision.per_sample.apply_per_sample`. Or, if batches hold
    the indices of their samples, as a batch on ``after_dataloader``, from any data.

    Args:
        index_key: where a batch holds the indices of its samples; None to mirror samples where they are loaded.
        flip_targets: mirror targets that are pictures (masks) of the images too.
        start, stop: when to begin and to end, such as ``"0.9dur"``, with ``index_key`` only; see `hocket.Span`.
        input_key, target_key: where image and target are in a sample or batch; None for those of the Trainer, or 0 and 1.
            Not needed for batches and samples that are just images, alone or as a sequence of one. With
            ``flip_targets=False`` there need not be any targets.

    Raises:
        ValueError: ``start`` or ``stop`` without ``index_key``.
        TypeError: later, for data without indices.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> data = torch.utils.data.TensorDataset(torch.rand(8, 1, 8, 8), torch.arange(8))
        >>> trainer = hocket.Trainer(
        ...     model=hocket_vision.small_resnet(), loss=torch.nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="2ep",
        ...     train_data=torch.utils.data.DataLoader(data, 4), algorithms=[hocket_vision.AlternatingFlip()], device="cpu",
        ... )
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        index_key: Any = None,
        flip_targets: bool = True,
        start: str | Time | None = None,
        stop: str | Time | None = None,
        input_key: Any = None,
        target_key: Any = None,
    ) -> None:
        batch = index_key is not None
        super().__init__("alternating-flip", batch, start, stop, input_key, by_batch="index_key=")
        self.index_key = index_key
        self.flip_targets = flip_targets
        self._targets = BatchPart("alternating-flip", "target", target_key)

    def sample_transform(self, state: State) -> tuple[_FlipSample, Any]:
        """Mirror samples whose turn it is."""
        return _FlipSample(self._images.place(state), self._targets.place(state) if self.flip_targets else None), None

    def transform_batch(self, state: State) -> None:
        """Mirror images of the batch whose turn it is."""
        indices = part(state.batch, self.index_key)
        epoch, seed = state.timestamp.epoch, state.generator(self).initial_seed()
        images = self._images.of(state)
        if self.flip_targets and is_picture_of(targets := targets_of(self._targets, state, _WITHOUT), images):
            state.batch = self._targets.put(state, alternating_flip(targets, indices, epoch, seed))
        state.batch = self._images.put(state, alternating_flip(images, indices, epoch, seed))


class _FlipSample:
    """Mirror a sample if it is its turn; ``target_at``: where a mask may be, or None."""

    by_place = True

    def __init__(self, at: Any, target_at: Any) -> None:
        self._at, self._target_at = at, target_at

    def __call__(self, sample: Any, place: tuple[int, int, int]) -> Any:
        seed, epoch, index = place
        if not flip_choices(torch.tensor(index), epoch, seed):
            return sample
        if isinstance(sample, Tensor) or is_pil(sample):
            return _mirrored(sample)
        image = part_of_sample(sample, "input", self._at)
        flipped = set_item(sample, self._at, _mirrored(image))
        if self._target_at is None or only_images(sample):
            return flipped
        target = part_of_sample(sample, "target", self._target_at, _WITHOUT)
        return set_item(flipped, self._target_at, _mirrored(target)) if is_picture_of(target, image) else flipped


#: How to mirror images that have no targets.
_WITHOUT = "flip_targets=False"


def _mirrored(image: Any) -> Any:
    height, width = size_of(image)
    return take(image, torch.arange(height), torch.arange(width).flip(0))
