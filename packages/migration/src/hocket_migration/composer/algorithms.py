"""Composer's algorithms by their names and arguments. Each returns the algorithm of hocket's plug-ins, which is imported then.

Where hocket's differs, the docstring says so; their own pages are in docs/algorithms. Keys of a batch may be an index, a name
or an attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hocket.plugins
from hocket.errors import WrongValue
from hocket_migration.composer.core.event import Event
from hocket_migration.composer.core.time import Time
from hocket_migration.composer.plugin_factory import make, no_counterpart, refuse


def Alibi(max_sequence_length: int, train_sequence_length_scaling: float = 0.25) -> Any:
    """Return hocket's ``alibi``."""
    return make(
        "algorithms", "alibi",
        max_sequence_length=max_sequence_length, train_sequence_length_scaling=train_sequence_length_scaling,
    )  # fmt: skip


def AugMix(
    severity: int = 3, depth: int = -1, width: int = 3, alpha: float = 1.0, augmentation_set: Any = "all"
) -> Any:
    """Return hocket's ``augmix``, which also takes data sets that are not torchvision's."""
    return make(
        "algorithms", "augmix",
        severity=severity, depth=depth, width=width, alpha=alpha, augmentation_set=augmentation_set,
    )  # fmt: skip


def BlurPool(
    replace_convs: bool = True, replace_maxpools: bool = True, blur_first: bool = True, min_channels: int = 16
) -> Any:
    """Return hocket's ``blurpool``. It keeps the padding mode of convolutions."""
    return make(
        "algorithms", "blurpool",
        replace_convs=replace_convs, replace_maxpools=replace_maxpools, blur_first=blur_first, min_channels=min_channels,
    )  # fmt: skip


def ChannelsLast() -> Any:
    """Return hocket's ``channels-last``."""
    return make("algorithms", "channels-last")


def ColOut(
    p_row: float = 0.15,
    p_col: float = 0.15,
    batch: bool = True,
    resize_target: Any = "auto",
    input_key: Any = 0,
    target_key: Any = 1,
) -> Any:
    """Return hocket's ``colout``."""
    return make(
        "algorithms", "colout",
        p_row=p_row, p_col=p_col, batch=batch, resize_target=resize_target, input_key=input_key, target_key=target_key,
    )  # fmt: skip


def CutMix(
    alpha: float = 1.0,
    interpolate_loss: bool = False,
    uniform_sampling: bool = False,
    input_key: Any = 0,
    target_key: Any = 1,
) -> Any:
    """Return hocket's ``cutmix``. It always interpolates the loss, which equals mixed targets for a cross entropy."""
    return make(
        "algorithms", "cutmix",
        alpha=alpha, uniform_sampling=uniform_sampling, input_key=input_key, target_key=target_key,
    )  # fmt: skip


def CutOut(num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False, input_key: Any = 0) -> Any:
    """Return hocket's ``cutout``, which draws a square for each image."""
    return make(
        "algorithms", "cutout",
        num_holes=num_holes, length=length, uniform_sampling=uniform_sampling, input_key=input_key,
    )  # fmt: skip


def EMA(
    half_life: str | None = "1000ba",
    smoothing: float | None = None,
    ema_start: str = "0.0dur",
    update_interval: str | None = None,
) -> Any:
    """Return hocket's ``ema``. A smoothing may be given without ``half_life=None``."""
    return make(
        "algorithms", "ema",
        half_life=half_life if smoothing is None else None, smoothing=smoothing, start=ema_start,
        update_interval=update_interval,
    )  # fmt: skip


def Factorize(
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 256,
    latent_channels: float = 0.25,
    min_features: int = 256,
    latent_features: float = 128,
) -> Any:
    """Return hocket's ``factorize``. It decomposes the weights; Composer draws new ones."""
    return make(
        "algorithms", "factorize",
        factorize_convs=factorize_convs, factorize_linears=factorize_linears, min_channels=min_channels,
        latent_channels=latent_channels, min_features=min_features, latent_features=latent_features,
    )  # fmt: skip


def GatedLinearUnits(
    act_fn: Callable[[Any], Any] | None = None, gated_layer_bias: bool = False, non_gated_layer_bias: bool = False
) -> Any:
    """Return hocket's ``gated-linear-units``, for more models than BERT. Only the gates get new weights."""
    return make(
        "algorithms", "gated-linear-units",
        activation=act_fn, init="normal", bias=non_gated_layer_bias, gate_bias=gated_layer_bias,
    )  # fmt: skip


def GhostBatchNorm(ghost_batch_size: int = 32) -> Any:
    """Return hocket's ``ghost-batchnorm``. Batches may be smaller than ``ghost_batch_size``."""
    return make("algorithms", "ghost-batchnorm", ghost_batch_size=ghost_batch_size)


def GradientClipping(clipping_type: str, clipping_threshold: float) -> Any:
    """Return hocket's ``gradient-clipping``. Adaptive clipping takes norms of weights as at least 0.001, as the paper does."""
    return make("algorithms", "gradient-clipping", kind=clipping_type, threshold=clipping_threshold)


def GyroDropout(p: float = 0.5, sigma: int = 256, tau: int = 16) -> Any:
    """Return hocket's ``gyro-dropout``."""
    return make("algorithms", "gyro-dropout", p=p, sigma=sigma, tau=tau)


def LabelSmoothing(smoothing: float = 0.1, target_key: Any = 1) -> Any:
    """Return hocket's ``label-smoothing``."""
    return make("algorithms", "label-smoothing", smoothing=smoothing, target_key=target_key)


def LayerFreezing(freeze_start: float = 0.5, freeze_level: float = 1.0) -> Any:
    """Return hocket's ``layer-freezing``, whose runs can be resumed. As in Composer, layers freeze between epochs."""
    kind = hocket.plugins.get("algorithms", "layer-freezing")

    def match(self: Any, event: Any, state: Any) -> bool:
        return event.value != Event.BATCH_START or not state.timestamp.batch_in_epoch

    between_epochs = type(kind.__name__, (kind,), {"match": match, "__doc__": kind.__doc__})
    return between_epochs(start=f"{freeze_start}dur", level=freeze_level)


def LowPrecisionLayerNorm(apply_at: Event = Event.INIT) -> Any:
    """Return hocket's ``low-precision-layernorm``."""
    refuse("LowPrecisionLayerNorm", "Omit it: modules are replaced on INIT.", apply_at=(apply_at, Event.INIT))
    return make("algorithms", "low-precision-layernorm")


def LowPrecisionGroupNorm(apply_at: Event = Event.INIT) -> Any:
    """Return hocket's ``low-precision-groupnorm``."""
    refuse("LowPrecisionGroupNorm", "Omit it: modules are replaced on INIT.", apply_at=(apply_at, Event.INIT))
    return make("algorithms", "low-precision-groupnorm")


def MixUp(alpha: float = 0.2, interpolate_loss: bool = False, input_key: Any = 0, target_key: Any = 1) -> Any:
    """Return hocket's ``mixup``. It always interpolates the loss, which equals mixed targets for a cross entropy."""
    return make("algorithms", "mixup", alpha=alpha, input_key=input_key, target_key=target_key)


def ProgressiveResizing(
    mode: Any = "resize",
    initial_scale: float = 0.5,
    finetune_fraction: float = 0.2,
    delay_fraction: float = 0.5,
    size_increment: int = 4,
    resize_targets: bool = False,
    input_key: Any = 0,
    target_key: Any = 1,
) -> Any:
    """Return hocket's ``progressive-resizing``. The size grows by batch in durations of epochs too."""
    return make(
        "algorithms", "progressive-resizing",
        mode=mode, initial_scale=initial_scale, finetune_fraction=finetune_fraction, delay_fraction=delay_fraction,
        size_increment=size_increment, resize_targets=resize_targets, input_key=input_key, target_key=target_key,
    )  # fmt: skip


def RandAugment(severity: int = 9, depth: int = 2, augmentation_set: Any = "all") -> Any:
    """Return hocket's ``randaugment``, with strengths up to ``severity`` as in Composer."""
    return make(
        "algorithms", "randaugment",
        severity=severity, depth=depth, augmentation_set=augmentation_set, magnitude="random",
    )  # fmt: skip


def SAM(rho: float = 0.05, epsilon: float = 1.0e-12, interval: int = 1) -> Any:
    """Return hocket's ``sam``, whose checkpoints have the optimizer's state."""
    return make("algorithms", "sam", rho=rho, epsilon=epsilon, interval=interval)


def SelectiveBackprop(
    start: float = 0.5,
    end: float = 0.9,
    keep: float = 0.5,
    scale_factor: float = 1.0,
    interrupt: int = 2,
    input_key: Any = 0,
    target_key: Any = 1,
) -> Any:
    """Return hocket's ``selective-backprop``. It acts before all augmentations; ``start`` and ``end`` advance by batch."""
    refuse("SelectiveBackprop", "The model's loss finds the targets.", target_key=(target_key, 1))
    return make(
        "algorithms", "selective-backprop",
        start=f"{start}dur", stop=f"{end}dur", keep=keep, scale_factor=scale_factor, interrupt=interrupt, input_key=input_key,
    )  # fmt: skip


def SeqLengthWarmup(
    duration: float = 0.3,
    min_seq_length: int = 8,
    max_seq_length: int = 1024,
    step_size: int = 8,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
) -> Any:
    """Return hocket's ``seq-length-warmup``."""
    return make(
        "algorithms", "seq-length-warmup",
        warmup=f"{duration}dur", min_seq_length=min_seq_length, max_seq_length=max_seq_length, step_size=step_size,
        truncate=truncate, preserve_end_of_sequence=preserve_end_of_sequence,
    )  # fmt: skip


def SqueezeExcite(latent_channels: float = 64, min_channels: int = 128) -> Any:
    """Return hocket's ``squeeze-excite``."""
    return make("algorithms", "squeeze-excite", latent_channels=latent_channels, min_channels=min_channels)


def StochasticDepth(
    target_layer_name: str = "ResNetBottleneck",
    stochastic_method: Any = "block",
    drop_rate: float = 0.2,
    drop_distribution: Any = "linear",
    drop_warmup: float | Time | str = 0.0,
) -> Any:
    """Return hocket's ``stochastic-depth``. It finds residual blocks of many classes, and the warm-up reaches the rate."""
    refuse(
        "StochasticDepth", "Write hocket_vision.StochasticDepth(blocks=…), with names of modules or classes.",
        target_layer_name=(target_layer_name, "ResNetBottleneck"),
    )  # fmt: skip
    warmup = f"{drop_warmup}dur" if isinstance(drop_warmup, int | float) else str(drop_warmup)
    return make(
        "algorithms", "stochastic-depth",
        drop_rate=drop_rate, method=stochastic_method, distribution=drop_distribution,
        warmup=None if Time.from_timestring(warmup).value == 0 else warmup,
    )  # fmt: skip


def SWA(
    swa_start: str = "0.7dur",
    swa_end: str = "0.97dur",
    update_interval: str = "1ep",
    schedule_swa_lr: bool = False,
    anneal_strategy: Any = "linear",
    anneal_steps: int = 10,
    swa_lr: float | None = None,
) -> Any:
    """Return hocket's ``swa``. It averages until the end, and computes batch-norm statistics of the averages.

    So there is no ``swa_end``, whose rest of training Composer needs for the statistics; only its default may be given.
    ``schedule_swa_lr`` needs ``swa_lr``.
    """
    refuse("SWA", "The average is used from its start, and there is no end.", swa_end=(swa_end, "0.97dur"))
    if schedule_swa_lr and swa_lr is None:
        raise WrongValue("SWA(schedule_swa_lr=True) needs the learning rate. Write swa_lr=0.05 or the like.")
    every = Time.from_timestring(update_interval)
    return make(
        "algorithms", "swa",
        start=swa_start, update_interval=update_interval, swa_lr=swa_lr if schedule_swa_lr else None,
        anneal=str(every * anneal_steps), anneal_strategy=anneal_strategy,
    )  # fmt: skip


def WeightStandardization(n_last_layers_ignore: int = 0) -> Any:
    """Return hocket's ``weight-standardization``."""
    return make("algorithms", "weight-standardization", n_last_layers_ignore=n_last_layers_ignore)


NoOpModel = no_counterpart(
    "NoOpModel", "Write hocket.Trainer(module, loss=…, algorithms=['no-op-model']), which takes plain modules only."
)
AugmentAndMixTransform = no_counterpart(
    "AugmentAndMixTransform", "Use AugMix(), or hocket_vision.functional.augmix(image)."
)
ColOutTransform = no_counterpart("ColOutTransform", "Use ColOut(), or hocket_vision.functional.colout(images).")
RandAugmentTransform = no_counterpart(
    "RandAugmentTransform", "Use RandAugment(), or hocket_vision.functional.randaugment(image)."
)
SqueezeExciteConv2d = no_counterpart("SqueezeExciteConv2d", "Use SqueezeExcite(), or hocket_vision.SqueezeExcite2d.")
SqueezeExcite2d = no_counterpart("SqueezeExcite2d", "Use hocket_vision.SqueezeExcite2d(channels, latent_channels).")
