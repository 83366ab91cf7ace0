"""Composer's ``composer.functional``: functional forms of its algorithms, by their names, on hocket's.

Those that change a model do so in place, and update ``optimizers``. The functions of hocket's plug-ins themselves are in
``hocket_general.functional``, ``hocket_vision.functional`` and ``hocket_nlp.functional``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hocket.plugins
from hocket.errors import WrongValue
from hocket.help.lazy import Absent
from hocket.surgery import update_optimizer
from hocket_migration.composer.plugin_factory import no_counterpart


def _function(algorithm: str, name: str) -> Any:
    """Return a function from the package that provides an algorithm. Raises PluginError, which says what to install."""
    package = hocket.plugins.get("algorithms", algorithm).__module__.partition(".")[0]
    return getattr(importlib.import_module(f"{package}.functional"), name)


def _operate(algorithm: str, name: str, model: nn.Module, optimizers: Any, *args: Any, **arguments: Any) -> int:
    """Change a model in place, and the optimizers with it. Return how many modules were replaced."""
    changed, replacements = _function(algorithm, name)(model, *args, **arguments)
    if changed is not model:
        raise WrongValue(
            f"{name} would replace {type(model).__name__} itself. Put it into a module, such as a ComposerModel."
        )
    for optimizer in _several(optimizers):
        update_optimizer(optimizer, replacements)
    return len(replacements)


def _several(optimizers: Any) -> Iterator[Optimizer]:
    yield from [] if optimizers is None else optimizers if isinstance(optimizers, list | tuple) else [optimizers]


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Any = None,
) -> None:
    """Blur before strided convolutions and max pooling."""
    _operate(
        "blurpool", "blurpool", model, optimizers,
        replace_convs=replace_convs, replace_maxpools=replace_maxpools, blur_first=blur_first, min_channels=min_channels,
    )  # fmt: skip


def apply_channels_last(model: nn.Module) -> None:
    """Store weights in the memory format ``torch.channels_last``."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it


def apply_squeeze_excite(
    model: nn.Module, latent_channels: float = 64, min_channels: int = 128, optimizers: Any = None
) -> None:
    """Add squeeze-and-excitation after convolutions."""
    _operate(
        "squeeze-excite", "squeeze_excite", model, optimizers,
        latent_channels=latent_channels, min_channels=min_channels,
    )  # fmt: skip


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: str = "ResNetBottleneck",
    stochastic_method: str = "block",
    drop_rate: float = 0.2,
    drop_distribution: str = "linear",
) -> None:
    """Drop residual branches at random in training."""
    _operate(
        "stochastic-depth", "stochastic_depth", model, None,
        method=stochastic_method, drop_rate=drop_rate, distribution=drop_distribution,
    )  # fmt: skip


def apply_ghost_batchnorm(model: nn.Module, ghost_batch_size: int = 32, optimizers: Any = None) -> None:
    """Normalize small parts of each batch by their own statistics."""
    _operate("ghost-batchnorm", "ghost_batchnorm", model, optimizers, ghost_batch_size=ghost_batch_size)


def apply_factorization(
    model: nn.Module,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: float = 0.25,
    min_features: int = 512,
    latent_features: float = 0.25,
    optimizers: Any = None,
) -> None:
    """Replace large layers by low-rank factors of their weights."""
    _operate(
        "factorize", "factorize", model, optimizers,
        factorize_convs=factorize_convs, factorize_linears=factorize_linears, min_channels=min_channels,
        latent_channels=latent_channels, min_features=min_features, latent_features=latent_features,
    )  # fmt: skip


def apply_weight_standardization(module: nn.Module, n_last_layers_ignore: int = 0) -> int:
    """Convolve with filters of mean 0 and variance 1. Return the number of convolutions."""
    return _operate(
        "weight-standardization", "weight_standardization", module, None, n_last_layers_ignore=n_last_layers_ignore
    )


def apply_low_precision_layernorm(model: nn.Module, precision: Any = None, optimizers: Any = None) -> None:
    """Run layer norm in the dtype of autocast."""
    _operate("low-precision-layernorm", "low_precision_layernorm", model, optimizers)


def apply_low_precision_groupnorm(model: nn.Module, precision: Any = None, optimizers: Any = None) -> None:
    """Run group norm in the dtype of autocast."""
    _operate("low-precision-groupnorm", "low_precision_groupnorm", model, optimizers)


def apply_alibi(model: nn.Module, max_sequence_length: int, optimizers: Any = None) -> None:
    """Use linear biases on attention instead of position embeddings."""
    _operate("alibi", "alibi", model, optimizers, max_sequence_length)


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: Any = None,
    act_fn: Any = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
) -> None:
    """Gate the feed-forward layers of a language model."""
    _operate(
        "gated-linear-units", "gated_linear_units", model, optimizers, act_fn,
        init="normal", bias=non_gated_layer_bias, gate_bias=gated_layer_bias,
    )  # fmt: skip


def apply_gradient_clipping(
    model: nn.Module, clipping_type: Any, clipping_threshold: float, fsdp_enabled: bool = False
) -> None:
    """Clip the gradients of a model in place."""
    _function("gradient-clipping", "clip_gradients")(list(model.parameters()), clipping_type, clipping_threshold)


def smooth_labels(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """Return smoothed class probabilities in the shape of the logits.

    Example:
        >>> import torch
        >>> from hocket_migration.composer import functional as cf
        >>> cf.smooth_labels(torch.zeros(1, 4), torch.tensor([1]))
        tensor([[0.0250, 0.9250, 0.0250, 0.0250]])
    """
    return _function("label-smoothing", "smooth_labels")(logits, target, smoothing)  # type: ignore[no-any-return]


def colout_batch(sample: Any, p_row: float = 0.15, p_col: float = 0.15, resize_target: Any = "auto") -> Any:
    """Drop random rows and columns of images, and of targets that are given in a tuple with them."""
    images, targets = sample if isinstance(sample, tuple) else (sample, None)
    return _function("colout", "colout")(images, targets, p_row, p_col, resize_target=resize_target)


def cutout_batch(input: Any, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False) -> Any:
    """Hide random squares of images, at the same places in all of them; of a PIL image, return one.

    Places are drawn from NumPy, as by Composer.
    """
    if not isinstance(input, Tensor):
        from torchvision.transforms import functional as transforms

        found = cutout_batch(transforms.to_tensor(input), num_holes, length, uniform_sampling)
        return transforms.to_pil_image(found)
    height, width = input.shape[-2:]
    side = int(min(height, width) * length)
    around = side // 2 if uniform_sampling else 0
    mask = torch.ones_like(input)
    for _ in range(num_holes):
        low = -side // 2 if uniform_sampling else 0
        y, x = (np.random.randint(low, size + around) for size in (height, width))
        (top, bottom), (left, right) = (
            np.clip((centre - side // 2, centre + side // 2), 0, size) for centre, size in ((y, height), (x, width))
        )
        mask[..., top:bottom, left:right] = 0
    return input * mask


def augmix_image(
    img: Any, severity: int = 3, depth: int = -1, width: int = 3, alpha: float = 1.0, augmentation_set: Any = "all"
) -> Any:
    """Mix an image with augmented versions of itself."""
    return _function("augmix", "augmix")(img, severity, depth, width, alpha, augmentation_set)


def randaugment_image(img: Any, severity: int = 9, depth: int = 2, augmentation_set: Any = "all") -> Any:
    """Apply a few random operations to an image."""
    return _function("randaugment", "randaugment")(img, severity, depth, augmentation_set, "random")


def mixup_batch(
    input: Tensor, target: Tensor, mixing: float | None = None, alpha: float = 0.2, indices: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """Return mixed inputs, the targets of the samples that were mixed in, and the weight of those.

    Example:
        >>> import torch
        >>> from hocket_migration.composer import functional as cf
        >>> cf.mixup_batch(torch.tensor([0.0, 1.0]), torch.tensor([3, 4]), mixing=0.25, indices=torch.tensor([1, 0]))
        (tensor([0.2500, 0.7500]), tensor([4, 3]), 0.25)
    """
    if mixing is None:
        share = np.random.beta(alpha, alpha)
        mixing = min(share, 1 - share)
    partners = torch.randperm(len(input)) if indices is None else indices
    return (1 - mixing) * input + mixing * input[partners], target[partners], mixing


@torch.no_grad()
def compute_ema(model: nn.Module, ema_model: nn.Module, smoothing: float = 0.99) -> None:
    """Move the weights and buffers of ``ema_model`` towards those of ``model``, in place."""
    averages = ema_model.state_dict()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name in averages:
            averages[name].copy_(averages[name] * smoothing + value * (1 - smoothing))


def set_batch_sequence_length(
    batch: Any, curr_seq_len: int, truncate: bool = True, preserve_end_of_sequence: bool = False
) -> Any:
    """Return a batch of shorter sequences. Raises ValueError for ``truncate=False``."""
    if not truncate:
        raise WrongValue(
            "set_batch_sequence_length(truncate=False) makes several sequences of one, which hocket has no function of. "
            "Use the algorithm: SeqLengthWarmup(truncate=False)."
        )
    return _function("seq-length-warmup", "truncate_sequences")(
        batch, curr_seq_len, preserve_end_of_sequence=preserve_end_of_sequence
    )


def resize_batch(
    input: Tensor, target: Tensor, scale_factor: float, mode: str = "resize", resize_targets: bool = False
) -> Any:
    """Resize or crop images, and targets of any height and width if they are to be. Sizes are rounded down, as by Composer.

    Raises ValueError for another mode, and for images or targets without height and width.
    """
    for each, what in ((input, "input"), *([(target, "target")] if resize_targets else [])):
        if each.dim() <= 2:
            raise WrongValue(
                f"resize_batch: {what} has shape {tuple(each.shape)}. Give one that ends in height and width."
            )
    if scale_factor >= 1:
        return input, target
    if mode.lower() not in ("resize", "crop"):
        raise WrongValue(f"resize_batch(mode={mode!r}): write 'resize' or 'crop'.")
    if mode.lower() == "resize":
        return _nearest(input, scale_factor), _nearest(target, scale_factor) if resize_targets else target
    places = [int(torch.randint(old - int(scale_factor * old), (1,))) for old in input.shape[-2:]]
    cropped = _crop(input, places, scale_factor)
    if not resize_targets:
        return cropped, target
    sizes = zip(places, target.shape[-2:], input.shape[-2:], strict=True)
    return cropped, _crop(target, [int(theirs / own * place) for place, theirs, own in sizes], scale_factor)


def _nearest(images: Tensor, scale: float) -> Tensor:
    """Resize ``(N, C, H, W)`` or masks ``(N, H, W)``, of any dtype."""
    masks, known = images.dim() == 3, images.is_floating_point() or images.dtype is torch.uint8
    given = images if known else images.float()
    given = given.unsqueeze(1) if masks else given
    found = torch.nn.functional.interpolate(given, scale_factor=scale, mode="nearest", recompute_scale_factor=False)
    return (found.squeeze(1) if masks else found).to(images.dtype)


def _crop(images: Tensor, places: list[int], scale: float) -> Tensor:
    (top, left), (height, width) = places, (int(scale * old) for old in images.shape[-2:])
    return images[..., top : top + height, left : left + width]


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Whether selective backprop acts on a batch."""
    should = _function("selective-backprop", "should_select")
    return bool(should(current_duration, batch_idx, start, end, interrupt))


_INSTEAD = {
    "cutmix_batch": "hocket_vision.functional.cutmix(images, targets), which returns a hocket.data.Mixture of targets",
    "freeze_layers": "hocket_general.functional.freeze_layers(model, fraction)",
    "apply_gyro_dropout": "hocket_general.functional.gyro_dropout(model, schedule)",
    "select_using_loss": "hocket_general.functional.select_using_loss(losses, keep)",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        return no_counterpart(name, f"Write {_INSTEAD[name]}.")
    raise Absent(__name__, name, __dir__())


def __dir__() -> list[str]:
    own = [name for name, each in globals().items() if getattr(each, "__module__", None) == __name__]
    return sorted([*_INSTEAD, *(name for name in own if name[0] != "_")])
