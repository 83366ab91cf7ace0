"""The methods of this package as plain functions on tensors, for any training loop."""

from __future__ import annotations

from hocket_general.activation_checkpointing import checkpoint_activations
from hocket_general.batch_size_warmup import batch_size_steps
from hocket_general.distillation import distillation_loss
from hocket_general.ema import ema_smoothing, ema_update
from hocket_general.factorize import factorize, largest_useful_rank, low_rank_factors
from hocket_general.ghost_batchnorm import ghost_batchnorm
from hocket_general.gradient_clipping import clip_gradients
from hocket_general.gyro_dropout import GyroSchedule, gyro_dropout
from hocket_general.label_smoothing import smooth_labels, soft_cross_entropy
from hocket_general.layer_freezing import freeze_layers
from hocket_general.loss_spike_guard import spike_score
from hocket_general.low_precision_groupnorm import low_precision_groupnorm
from hocket_general.low_precision_layernorm import low_precision_layernorm
from hocket_general.no_op_model import no_op_model
from hocket_general.sam import sam_perturbation
from hocket_general.selective_backprop import select_using_loss, should_select
from hocket_general.swa import swa_update
from hocket_general.weight_standardization import standardize_weight, weight_standardization

__all__ = [
    "GyroSchedule",
    "batch_size_steps",
    "checkpoint_activations",
    "clip_gradients",
    "distillation_loss",
    "ema_smoothing",
    "ema_update",
    "factorize",
    "freeze_layers",
    "ghost_batchnorm",
    "gyro_dropout",
    "largest_useful_rank",
    "low_precision_groupnorm",
    "low_precision_layernorm",
    "low_rank_factors",
    "no_op_model",
    "sam_perturbation",
    "select_using_loss",
    "should_select",
    "smooth_labels",
    "soft_cross_entropy",
    "spike_score",
    "standardize_weight",
    "swa_update",
    "weight_standardization",
]
