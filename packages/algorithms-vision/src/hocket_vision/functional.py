"""The methods as plain functions, for any training loop.

::

    from hocket_vision import functional as vf
    model, changed = vf.blurpool(model)
    images, targets = vf.colout(images, targets, p_row=0.15, p_col=0.15)
    image = vf.augmix(image, severity=3)
"""

from hocket_vision.augmix import augmix
from hocket_vision.blurpool import blurpool
from hocket_vision.colout import colout

__all__ = ["augmix", "blurpool", "colout"]
