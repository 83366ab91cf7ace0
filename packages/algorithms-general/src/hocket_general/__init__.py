"""Training methods for any model. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_general import functional as functional
    from hocket_general.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from hocket_general.batch_size_warmup import BatchSizeWarmup as BatchSizeWarmup
    from hocket_general.decoupled import DecoupledAdamW as DecoupledAdamW, DecoupledSGDW as DecoupledSGDW
    from hocket_general.distillation import Distillation as Distillation
    from hocket_general.ema import EMA as EMA
    from hocket_general.factorize import Factorize as Factorize
    from hocket_general.ghost_batchnorm import GhostBatchNorm as GhostBatchNorm
    from hocket_general.gradient_clipping import GradientClipping as GradientClipping
    from hocket_general.gyro_dropout import GyroDropout as GyroDropout
    from hocket_general.label_smoothing import LabelSmoothing as LabelSmoothing
    from hocket_general.lamb import LAMB as LAMB
    from hocket_general.layer_freezing import LayerFreezing as LayerFreezing
    from hocket_general.lion import Lion as Lion
    from hocket_general.loss_spike_guard import LossSpikeGuard as LossSpikeGuard
    from hocket_general.low_precision_groupnorm import LowPrecisionGroupNorm as LowPrecisionGroupNorm
    from hocket_general.low_precision_layernorm import LowPrecisionLayerNorm as LowPrecisionLayerNorm
    from hocket_general.muon import Muon as Muon
    from hocket_general.no_op_model import NoOpModel as NoOpModel
    from hocket_general.sam import SAM as SAM
    from hocket_general.schedule_free import (
        schedule_free_adamw as schedule_free_adamw,
        schedule_free_sgd as schedule_free_sgd,
    )
    from hocket_general.selective_backprop import SelectiveBackprop as SelectiveBackprop
    from hocket_general.soap_optimizer import soap as soap
    from hocket_general.swa import SWA as SWA
    from hocket_general.weight_standardization import WeightStandardization as WeightStandardization

__getattr__, __dir__ = lazy(__name__)
