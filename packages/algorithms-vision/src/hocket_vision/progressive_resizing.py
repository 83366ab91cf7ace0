"""Progressive resizing: train on small images first.

Source: Howard and others 2018, fast.ai's entry for DAWNBench (https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html); the
schedule is that of MosaicML Composer (2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from hocket.errors import WrongValue
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.batch_part import BatchPart
from hocket_vision.boxes import check_images
from hocket_vision.colout import is_picture_of, take
from hocket_vision.per_sample import targets_of

if TYPE_CHECKING:
    from hocket.state.state import State

Mode = Literal["resize", "crop"]


def scale_at(
    elapsed: float, initial_scale: float = 0.5, finetune_fraction: float = 0.2, delay_fraction: float = 0.5
) -> float:
    """Return the scale of the images after a fraction of the run: ``initial_scale``, then a line, then 1.

    Example:
        >>> from hocket_vision.progressive_resizing import scale_at
        >>> [scale_at(elapsed) for elapsed in (0.0, 0.5, 0.65, 0.8)]
        [0.5, 0.5, 0.75, 1.0]
    """
    ramp = 1 - delay_fraction - finetune_fraction
    if elapsed < delay_fraction - 1e-9:
        return initial_scale
    if elapsed >= 1 - finetune_fraction - 1e-9 or ramp <= 0:
        return 1.0
    return initial_scale + (1 - initial_scale) * (elapsed - delay_fraction) / ramp


def resized(size: int, scale: float, size_increment: int = 4) -> int:
    """Return the nearest multiple of ``size_increment`` to ``scale * size``, at least one of it and at most ``size``."""
    if scale >= 1:
        return size
    return min(size, max(1, round(size * scale / size_increment)) * size_increment)


def crop(images: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Return a view of a part of images ``(..., H, W)``."""
    return images[..., top : top + height, left : left + width]


def shrink(images: Tensor, height: int, width: int) -> Tensor:
    """Return images ``(..., H, W)`` with ``height`` rows and ``width`` columns, evenly spaced: the nearest pixels.

    Of any dtype, and of masks too, whose values are never mixed.
    """
    rows, columns = (
        torch.arange(new) * old // new for new, old in zip((height, width), images.shape[-2:], strict=True)
    )
    return take(images, rows, columns)


@overload
def resize_batch(
    images: Tensor,
    targets: None = None,
    scale: float = 0.5,
    *,
    mode: Mode = "resize",
    size_increment: int = 1,
    resize_targets: bool | Literal["auto"] = "auto",
    generator: torch.Generator | None = None,
) -> Tensor: ...


@overload
def resize_batch(
    images: Tensor,
    targets: Any,
    scale: float = 0.5,
    *,
    mode: Mode = "resize",
    size_increment: int = 1,
    resize_targets: bool | Literal["auto"] = "auto",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Any]: ...


def resize_batch(
    images: Tensor,
    targets: Any = None,
    scale: float = 0.5,
    *,
    mode: Mode = "resize",
    size_increment: int = 1,
    resize_targets: bool | Literal["auto"] = "auto",
    generator: torch.Generator | None = None,
) -> Any:
    """Shrink a batch of images, or crop it at a random place that is the same for all of them.

    Args:
        images: ``(B, C, H, W)`` or ``(B, H, W)``, of any dtype.
        targets: anything; pictures that belong to the images are shrunk or cropped in the same way.
        scale: new height and width as fractions of the old ones, above 0; 1 and more returns the same objects.
        mode: ``"resize"``, to the nearest pixels, or ``"crop"``.
        size_increment: height and width are rounded to a multiple of this many pixels.
        resize_targets: whether ``targets`` are pictures. ``"auto"``: if they are a tensor that ends in the images' ``H, W`` and
            has their number of dimensions or one less.
        generator: source of randomness of ``"crop"``; torch's default generator if None.

    Returns:
        ``images``, or ``(images, targets)`` if targets were given; a crop is a view.

    Raises:
        ValueError: an argument is out of range, or ``resize_targets=True`` with targets of another size.
        TypeError: ``images`` are not a batch of images.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import resize_batch
        >>> resize_batch(torch.rand(2, 3, 32, 32), scale=0.75).shape
        torch.Size([2, 3, 24, 24])
    """
    _check_common(mode, size_increment, resize_targets)
    if not scale > 0:
        raise WrongValue(
            f"scale is {scale}, but must be above 0. For images of half the height and width write «scale=0.5»."
        )
    height, width = check_images("resize_batch", images).shape[-2:]
    pictures = is_picture_of(targets, images)
    if resize_targets is True and not pictures:
        found = f"of shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise WrongValue(
            f"«resize_targets=True» asks for targets as high and wide as the images, {(height, width)}, but they are {found}. "
            "Keep «resize_targets='auto'» for targets that are not pictures."
        )
    size = resized(height, scale, size_increment), resized(width, scale, size_increment)
    new = [images, targets] if pictures and resize_targets else [images]
    if size != (height, width):
        if mode == "crop":
            device = "cpu" if generator is None else generator.device
            top, left = (
                int(torch.randint(old - small + 1, (), generator=generator, device=device))
                for old, small in zip((height, width), size, strict=True)
            )
            new = [crop(each, top, left, *size) for each in new]
        else:
            new = [shrink(each, *size) for each in new]
    if targets is None:
        return new[0]
    return new[0], new[1] if len(new) > 1 else targets


class ProgressiveResizing(Algorithm):
    """Train on small images first, which cost less, and on full images at the end (Howard 2018; MosaicML Composer 2021).

    The images have ``initial_scale`` of their height and width for ``delay_fraction`` of the run, then grow linearly, and are
    complete for the last ``finetune_fraction``. The scale changes by batch, also in a run of one epoch. Acts on
    ``after_dataloader``; evaluation sees full images. Logs ``progressive-resizing/scale``, the scale of the schedule, and the
    resulting ``/height`` and ``/width``.

    Args:
        mode: ``"resize"`` or ``"crop"``.
        initial_scale: the scale at the beginning, in ``(0, 1]``.
        finetune_fraction: the fraction of the run with full images, at its end.
        delay_fraction: the fraction of the run with the smallest images; together with ``finetune_fraction`` at most 1.
        size_increment: height and width are multiples of this many pixels, so that there are few different sizes.
        resize_targets: see :func:`resize_batch`.
        input_key, target_key: where images and targets are in a batch; None for those of the Trainer, or 0 and 1.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> trainer = hocket.Trainer(
        ...     model=hocket_vision.small_resnet(), loss=torch.nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="2ep",
        ...     train_data=[(torch.rand(4, 1, 8, 8), torch.arange(4))], device="cpu",
        ...     algorithms=[hocket_vision.ProgressiveResizing(delay_fraction=0.2)],
        ... )
        >>> result = trainer.fit()
    """

    events = {Event.AFTER_DATALOADER}
    phase = Phase.DATA
    before = ("augmix", "colout", "cutout", "randaugment")

    def __init__(
        self,
        mode: Mode = "resize",
        initial_scale: float = 0.5,
        finetune_fraction: float = 0.2,
        delay_fraction: float = 0.5,
        size_increment: int = 4,
        resize_targets: bool | Literal["auto"] = "auto",
        input_key: Any = None,
        target_key: Any = None,
    ) -> None:
        _check_common(mode, size_increment, resize_targets)
        if not 0 < initial_scale <= 1:
            raise WrongValue(f"initial_scale is {initial_scale}, but must be in (0, 1]. Try initial_scale=0.5.")
        if min(finetune_fraction, delay_fraction) < 0 or not finetune_fraction + delay_fraction <= 1 + 1e-9:
            raise WrongValue(
                f"«delay_fraction={delay_fraction}» and «finetune_fraction={finetune_fraction}» are parts of one run: they "
                "must be 0 or more and add up to at most 1. Try «delay_fraction=0.5», «finetune_fraction=0.2»."
            )
        self.mode = mode
        self.initial_scale = initial_scale
        self.finetune_fraction = finetune_fraction
        self.delay_fraction = delay_fraction
        self.size_increment = size_increment
        self.resize_targets = resize_targets
        #: Whether the smallest images are as large as full ones.
        self._too_coarse = False
        self._images = BatchPart("progressive-resizing", "input", input_key)
        self._targets = BatchPart("progressive-resizing", "target", target_key)

    def no_effect(self, state: State) -> str:
        """Return that all images are full ones by its schedule, if so."""
        if self._too_coarse:
            return (
                f"«size_increment={self.size_increment}» rounds all sizes up to the full one. Give a smaller increment."
            )
        if scale_at(0.0, self.initial_scale, self.finetune_fraction, self.delay_fraction) < 1:
            return ""
        return (
            f"images are full from the beginning, with «initial_scale={self.initial_scale}» and "
            f"«finetune_fraction={self.finetune_fraction}». Lower them, to 0.5 and 0.2 for instance."
        )

    def apply(self, event: Event, state: State) -> None:
        """Resize the batch."""
        scale = scale_at(state.elapsed(), self.initial_scale, self.finetune_fraction, self.delay_fraction)
        images = self._images.of(state)
        targets = targets_of(self._targets, state, "resize_targets=False") if self.resize_targets else None
        small = resize_batch(
            images,
            targets,
            scale,
            mode=self.mode,
            size_increment=self.size_increment,
            resize_targets=self.resize_targets,
            generator=state.generator(self),
        )
        if targets is not None:
            small, targets = small
        if small is not images:
            state.batch = self._images.put(state, small)
            if targets is not None:
                state.batch = self._targets.put(state, targets)
        if scale < 1:
            smallest = [resized(size, self.initial_scale, self.size_increment) for size in images.shape[-2:]]
            self._too_coarse = smallest == list(images.shape[-2:])
        height, width = small.shape[-2:]
        name = "progressive-resizing"
        state.log({f"{name}/height": height, f"{name}/width": width, f"{name}/scale": scale})


def _check_common(mode: str, size_increment: int, resize_targets: bool | str) -> None:
    if mode not in ("resize", "crop"):
        raise WrongValue(f"mode is {mode!r}. Give 'resize' or 'crop'.")
    if size_increment < 1:
        raise WrongValue(f"size_increment is {size_increment}, but must be 1 pixel or more. Try «size_increment=4».")
    if resize_targets not in (True, False, "auto"):
        raise WrongValue(f"resize_targets must be True, False or 'auto', but is {resize_targets!r}.")
