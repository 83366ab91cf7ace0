"""The methods as plain functions, for any training loop.

::

    from hocket_vision import functional as vf
    model, changed = vf.blurpool(model)
    images, targets = vf.colout(images, targets, p_row=0.15, p_col=0.15)
    image = vf.augmix(image, severity=3)
"""

from hocket_vision.alternating_flip import alternating_flip
from hocket_vision.augmix import augmix
from hocket_vision.blurpool import blurpool
from hocket_vision.channels_last import channels_last
from hocket_vision.colout import colout
from hocket_vision.cutmix import cutmix
from hocket_vision.cutout import cutout
from hocket_vision.mixup import mixup
from hocket_vision.progressive_resizing import resize_batch
from hocket_vision.randaugment import randaugment
from hocket_vision.squeeze_excite import squeeze_excite
from hocket_vision.stochastic_depth import stochastic_depth

__all__ = [
    "alternating_flip",
    "augmix",
    "blurpool",
    "channels_last",
    "colout",
    "cutmix",
    "cutout",
    "mixup",
    "randaugment",
    "resize_batch",
    "squeeze_excite",
    "stochastic_depth",
]
