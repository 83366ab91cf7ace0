"""hocket's functional forms of image methods: name -> how to prepare a call on a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from functional import blurred, images, integers, labels

from hocket_vision import functional as vf

DISTRIBUTIONS = ("hocket-algorithms-vision", "torchvision")

CASES: dict[str, Callable[[int, int], Callable[[], Any]]] = {
    "colout": lambda batch, side: partial(vf.colout, images(batch, side), labels(batch)),
    "cutmix": lambda batch, side: partial(vf.cutmix, images(batch, side), labels(batch)),
    "mixup": lambda batch, side: partial(vf.mixup, images(batch, side), labels(batch)),
    "cutout": lambda batch, side: partial(vf.cutout, images(batch, side)),
    "augmix": lambda batch, side: partial(vf.augmix, integers(batch, side), augmentation_set="all"),
    "randaugment": lambda batch, side: partial(
        vf.randaugment, integers(batch, side), augmentation_set="all", magnitude="random"
    ),
    "blurpool": lambda batch, side: blurred(partial(vf.blurpool, min_channels=1), batch, side),
    "blurpool, channels-last": lambda batch, side: blurred(
        partial(vf.blurpool, min_channels=1), batch, side, torch.channels_last
    ),
}
