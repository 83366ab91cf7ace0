"""Training methods for image models. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hocket_vision' has no attribute '{name}'; it has {', '.join(__all__)}")
    module = importlib.import_module(f"hocket_vision.{_PUBLIC[name] or name}")
    value = getattr(module, name) if _PUBLIC[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
