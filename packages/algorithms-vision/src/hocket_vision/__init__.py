"""Training methods for image models. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket_vision import functional
    from hocket_vision.augmix import AugMix
    from hocket_vision.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool
    from hocket_vision.colout import ColOut
    from hocket_vision.datasets import digits
    from hocket_vision.models import small_resnet

#: Public name -> the module that defines it; a module stands for itself.
_PUBLIC = {
    "AugMix": "augmix",
    "BlurConv2d": "blurpool",
    "BlurMaxPool2d": "blurpool",
    "BlurPool": "blurpool",
    "ColOut": "colout",
    "digits": "datasets",
    "functional": "",
    "small_resnet": "models",
}

__all__ = ["AugMix", "BlurConv2d", "BlurMaxPool2d", "BlurPool", "ColOut", "digits", "functional", "small_resnet"]

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
