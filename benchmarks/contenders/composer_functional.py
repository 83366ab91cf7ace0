"""The same functional forms of MosaicML Composer; AugMix and RandAugment on one PIL image after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import composer.functional as cf
import torch
from composer.algorithms.utils import augmentation_sets
from functional import blurred, images, integers, labels
from torchvision.transforms.functional import to_pil_image

DISTRIBUTIONS = ("mosaicml", "torchvision", "pillow")
BLUR = {"replace_convs": True, "replace_maxpools": True, "blur_first": True, "min_channels": 1}


def each(function: Callable[..., Any], batch: int, side: int) -> Callable[[], Any]:
    """A call for each image."""
    pictures = [to_pil_image(image) for image in integers(batch, side)]
    return lambda: [function(picture, augmentation_set=augmentation_sets["all"]) for picture in pictures]


CASES: dict[str, Callable[[int, int], Callable[[], Any]]] = {
    "colout": lambda batch, side: partial(cf.colout_batch, (images(batch, side), labels(batch))),
    "cutmix": lambda batch, side: partial(cf.cutmix_batch, images(batch, side), labels(batch), alpha=1.0),
    "mixup": lambda batch, side: partial(cf.mixup_batch, images(batch, side), labels(batch), alpha=0.2),
    "cutout": lambda batch, side: partial(cf.cutout_batch, images(batch, side)),
    "augmix": lambda batch, side: each(cf.augmix_image, batch, side),
    "randaugment": lambda batch, side: each(cf.randaugment_image, batch, side),
    "blurpool": lambda batch, side: blurred(partial(cf.apply_blurpool, **BLUR), batch, side),
    "blurpool, channels-last": lambda batch, side: blurred(
        partial(cf.apply_blurpool, **BLUR), batch, side, torch.channels_last
    ),
}
