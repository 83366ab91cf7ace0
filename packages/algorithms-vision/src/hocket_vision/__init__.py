"""Training methods for image models. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_vision import functional as functional
    from hocket_vision.alternating_flip import AlternatingFlip as AlternatingFlip
    from hocket_vision.augmix import AugMix as AugMix
    from hocket_vision.blurpool import BlurConv2d as BlurConv2d, BlurMaxPool2d as BlurMaxPool2d, BlurPool as BlurPool
    from hocket_vision.channels_last import ChannelsLast as ChannelsLast
    from hocket_vision.colout import ColOut as ColOut
    from hocket_vision.cutmix import CutMix as CutMix
    from hocket_vision.cutout import CutOut as CutOut
    from hocket_vision.datasets import digits as digits
    from hocket_vision.mixup import MixUp as MixUp
    from hocket_vision.models import small_resnet as small_resnet
    from hocket_vision.progressive_resizing import ProgressiveResizing as ProgressiveResizing
    from hocket_vision.randaugment import RandAugment as RandAugment
    from hocket_vision.squeeze_excite import SqueezeExcite as SqueezeExcite, SqueezeExcite2d as SqueezeExcite2d
    from hocket_vision.stochastic_depth import StochasticDepth as StochasticDepth
    from hocket_vision.tasks import ClassificationTask as ClassificationTask, SegmentationTask as SegmentationTask

__getattr__, __dir__ = lazy(__name__)
