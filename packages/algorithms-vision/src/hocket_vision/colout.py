"""ColOut: drop random rows and columns of images, for fewer pixels to compute on.

Source: MosaicML Composer's method card for ColOut (2021); there is no paper.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from hocket.basics.time import Time
from hocket.data.items import set_item
from hocket.errors import WrongType, WrongValue
from hocket.state.batch_part import BatchPart
from hocket_vision.memory_format import in_format_of
from hocket_vision.per_sample import (
    SampleOrBatchAlgorithm,
    Transform,
    is_pil,
    only_images,
    part_of_sample,
    targets_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from hocket.state.state import State

ImageT = TypeVar("ImageT", Tensor, "Image")


def colout_indices(
    height: int, width: int, p_row: float = 0.15, p_col: float = 0.15, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the rows and columns to keep: sorted int64 indices, ``int((1 - p) * size)`` of each, but at least one.

    Raises ValueError if a probability is outside ``[0, 1)``.
    """
    check_arguments(p_row, p_col)
    return _kept(height, p_row, generator), _kept(width, p_col, generator)


def take(image: ImageT, rows: Tensor, columns: Tensor) -> ImageT:
    """Return ``image``, a ``(..., H, W)`` tensor or PIL image, reduced to these rows and columns."""
    if isinstance(image, Tensor):
        rows, columns = (each.to(image.device, non_blocking=True) for each in (rows, columns))
        taken = in_format_of(image[..., rows[:, None], columns], image)  # faster than index_select twice
        if type(image) is not Tensor:  # a tv_tensor says whether it is an image or a mask; indexing forgets that
            from torchvision import tv_tensors

            if isinstance(image, tv_tensors.TVTensor):
                return tv_tensors.wrap(taken, like=image)
        return taken
    return _take_pil(image, rows, columns)


@overload
def colout(
    images: ImageT,
    targets: None = None,
    p_row: float = 0.15,
    p_col: float = 0.15,
    *,
    resize_target: bool | Literal["auto"] = "auto",
    generator: torch.Generator | None = None,
) -> ImageT: ...


@overload
def colout(
    images: ImageT,
    targets: Any,
    p_row: float = 0.15,
    p_col: float = 0.15,
    *,
    resize_target: bool | Literal["auto"] = "auto",
    generator: torch.Generator | None = None,
) -> tuple[ImageT, Any]: ...


def colout(
    images: Any,
    targets: Any = None,
    p_row: float = 0.15,
    p_col: float = 0.15,
    *,
    resize_target: bool | Literal["auto"] = "auto",
    generator: torch.Generator | None = None,
) -> Any:
    """Drop a random fraction of the rows and of the columns, the same ones of every image.

    Args:
        images: tensor ``(B, C, H, W)`` or ``(C, H, W)`` of any dtype, or a PIL image.
        targets: anything; pictures that belong to the images (masks, depth) lose the same rows and columns.
        p_row, p_col: fraction of the rows and columns to drop, in ``[0, 1)``. ``int((1 - p) * size)`` stay, at least one.
        resize_target: whether ``targets`` are such pictures. ``"auto"``: if they are a tensor that ends in the images'
            ``H, W`` and has the images' number of dimensions or one less, or a PIL image of the same size.
        generator: source of randomness; torch's default generator if None.

    Returns:
        ``images``, or ``(images, targets)`` if targets were given; new tensors, the ones given are not changed.

    Raises:
        ValueError: for a probability outside ``[0, 1)``, or ``resize_target=True`` with targets of another size.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import colout
        >>> colout(torch.rand(2, 3, 32, 32), p_row=0.25, p_col=0.5).shape
        torch.Size([2, 3, 24, 16])
    """
    check_arguments(p_row, p_col, resize_target)
    height, width = size_of(images)
    resized = resize_target is True or (resize_target == "auto" and is_picture_of(targets, images))
    if resize_target is True and (targets is None or size_of(targets) != (height, width)):
        found = "there are none" if targets is None else f"they are {size_of(targets)}"
        raise WrongValue(
            f"«resize_target=True» asks for targets as high and wide as the images, {(height, width)}, but {found}. "
            "Keep «resize_target='auto'» for targets that are not pictures."
        )
    rows, columns = colout_indices(height, width, p_row, p_col, generator=generator)
    images = take(images, rows, columns)
    if targets is None:
        return images
    return images, take(targets, rows, columns) if resized else targets


class ColOut(SampleOrBatchAlgorithm):
    """Drop random rows and columns of the training images, for less computation.

    With ``batch``, draws once for all images of a batch, on all ranks, on ``after_dataloader``. Otherwise draws for each
    sample, where it is loaded; see :func:`hocket_vision.per_sample.apply_per_sample`.

    Args:
        p_row, p_col, resize_target: see :func:`colout`.
        batch: whether all images of a batch lose the same rows and columns.
        start, stop: when to begin and to end, such as ``"0.9dur"``, with ``batch`` only; see `hocket.Span`.
        input_key, target_key: where images and targets are in a batch, or in a sample; None for the Trainer's ``inputs`` and
            ``targets``, or index 0 and 1. Not needed for batches and samples that are just images, alone or as a sequence of
            one. With ``resize_target=False`` there need not be any targets.

    Raises:
        ValueError: for arguments out of range, or ``start`` or ``stop`` without ``batch``.
        TypeError, KeyError: later, for batches without images at ``input_key``, or without targets at ``target_key``.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> trainer = hocket.Trainer(
        ...     model=hocket_vision.small_resnet(), loss=torch.nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     train_data=[(torch.rand(4, 1, 8, 8), torch.arange(4))], algorithms=[hocket_vision.ColOut()], device="cpu",
        ... )
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        p_row: float = 0.15,
        p_col: float = 0.15,
        batch: bool = True,
        resize_target: bool | Literal["auto"] = "auto",
        start: str | Time | None = None,
        stop: str | Time | None = None,
        input_key: Any = None,
        target_key: Any = None,
    ) -> None:
        check_arguments(p_row, p_col, resize_target)
        super().__init__("colout", batch, start, stop, input_key)
        self.settings: dict[str, Any] = {"p_row": p_row, "p_col": p_col, "resize_target": resize_target}
        self._targets = BatchPart("colout", "target", target_key)

    def sample_transform(self, state: State) -> tuple[Transform, Any]:
        """Drop rows and columns of each sample."""
        keys = self._images.place(state), self._targets.place(state)
        return partial(_colout_sample, keys=keys, **self.settings), None

    def transform_batch(self, state: State) -> None:
        """Drop rows and columns of the batch."""
        images = self._images.of(state)
        if isinstance(images, Tensor) and images.dim() == 2:
            raise WrongType(
                f"ColOut was given inputs of shape {tuple(images.shape)}, which are vectors and not a batch of images, "
                "(B, C, H, W) or (B, H, W). Remove colout, or say where the images are with input_key=."
            )
        targets = targets_of(self._targets, state, _WITHOUT) if self.settings["resize_target"] else None
        dropped = colout(images, targets, generator=state.generator(self), **self.settings)
        if targets is not None:
            dropped, targets = dropped
        state.batch = self._images.put(state, dropped)
        if targets is not None:
            state.batch = self._targets.put(state, targets)


def _colout_sample(sample: Any, *, keys: tuple[Any, Any], **settings: Any) -> Any:
    """Return a sample with fewer pixels; the input is not changed."""
    if isinstance(sample, Tensor) or is_pil(sample):
        return colout(sample, **settings)
    at, target_at = keys
    image = part_of_sample(sample, "input", at)
    if not settings["resize_target"] or only_images(sample):
        return set_item(sample, at, colout(image, **settings))
    image, target = colout(image, part_of_sample(sample, "target", target_at, _WITHOUT), **settings)
    return set_item(set_item(sample, at, image), target_at, target)


#: How to use ColOut where there are no targets.
_WITHOUT = "resize_target=False"


def check_arguments(p_row: float, p_col: float, resize_target: bool | str = "auto") -> None:
    """Raise ValueError for invalid arguments of ColOut."""
    for name, p in (("p_row", p_row), ("p_col", p_col)):
        if not 0 <= p < 1:
            raise WrongValue(
                f"{name} is the fraction of the image to drop and must be in [0, 1), but is {p}. Try {name}=0.15."
            )
    if resize_target not in (True, False, "auto"):
        raise WrongValue(f"resize_target must be True, False or 'auto', but is {resize_target!r}.")


def size_of(image: Any) -> tuple[int, int]:
    """Return height and width of a ``(..., H, W)`` tensor or a PIL image. Raises TypeError for anything else."""
    if isinstance(image, Tensor) and image.dim() >= 2:
        return image.shape[-2], image.shape[-1]
    if is_pil(image):
        return image.height, image.width
    shape = f" of shape {tuple(image.shape)}" if isinstance(image, Tensor) else ""
    raise WrongType(
        f"ColOut takes images as (..., H, W) tensors or PIL images, but was given {type(image).__name__}{shape}. Say "
        "where the images are in a batch with input_key=, and where the targets are with target_key=; or remove colout if the "
        "inputs are not images."
    )


def _kept(size: int, p: float, generator: torch.Generator | None) -> Tensor:
    count = max(1, math.floor((1 - p) * size + 1e-9))  # (1 - 0.8) * 10 is a little less than 2
    device = "cpu" if generator is None else generator.device
    return torch.randperm(size, generator=generator, device=device)[:count].sort().values


def is_picture_of(targets: Any, images: Any) -> bool:
    """Whether targets are masks or the like: as high and wide as the images, with as many dimensions or one less."""
    if isinstance(targets, Tensor):
        dims = images.dim() if isinstance(images, Tensor) else 3
        return targets.dim() in (dims - 1, dims) and tuple(targets.shape[-2:]) == size_of(images)
    return is_pil(targets) and size_of(targets) == size_of(images)


def _take_pil(image: Image, rows: Tensor, columns: Tensor) -> Image:
    from PIL import Image as pil

    if image.mode == "1":  # eight pixels to a byte
        return _take_pil(image.convert("L"), rows, columns).convert("1")
    pixels = np.asarray(image)[rows.cpu().numpy()][:, columns.cpu().numpy()]
    taken = pil.frombytes(image.mode, (len(columns), len(rows)), pixels.tobytes())
    if image.mode == "P":
        taken.putpalette(image.getpalette() or [])
    return taken
