"""Every algorithm beside the best loop by hand that does the same (8): its step ÷ the loop's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from harness import Series, table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import hocket
from hocket_general import functional as gf
from hocket_vision import functional as vf
from hocket_vision.models import small_resnet

Batch = tuple[Tensor, Tensor]
Loop = Callable[[nn.Module, Iterable[Batch]], None]
STEPS, WARMUP = 24, 4


def plain(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    change: Callable[[Tensor, Tensor], tuple[Tensor, Any]] | None = None,
    loss: Callable[[Tensor, Any], Tensor] = F.cross_entropy,
    before_step: Callable[[], Any] = lambda: None,
    after_step: Callable[[], Any] = lambda: None,
) -> None:
    """The loop that anyone would write, with what a method adds to it."""
    model.train()
    optimizer = _sgd(model.parameters())
    for images, labels in batches:
        if change is not None:
            images, labels = change(images, labels)
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        before_step()
        optimizer.step()
        after_step()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def surgery(change: Callable[[nn.Module], Any]) -> Loop:
    """The plain loop over a model that was changed by the functional form."""

    def loop(model: nn.Module, batches: Iterable[Batch]) -> None:
        change(model)
        plain(model, batches)

    return loop


def averaged_by_torch(average: Any, buffers: bool) -> Loop:
    """With torch's AveragedModel."""

    def loop(model: nn.Module, batches: Iterable[Batch]) -> None:
        averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=buffers)
        plain(model, batches, after_step=lambda: averaged.update_parameters(model))

    return loop


def ema_lerp(model: nn.Module, batches: Iterable[Batch]) -> None:
    """With one fused operation over parameters and buffers."""
    values = [value for value in model.state_dict(keep_vars=True).values() if value.is_floating_point()]
    averages = [value.detach().clone() for value in values]

    def update() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(averages, values, 0.001)

    plain(model, batches, after_step=update)


def clipping(model: nn.Module, batches: Iterable[Batch]) -> None:
    """With torch's function."""
    plain(model, batches, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def smoothing(model: nn.Module, batches: Iterable[Batch]) -> None:
    """With the argument of torch's loss."""
    plain(model, batches, loss=lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1))


def sam(model: nn.Module, batches: Iterable[Batch]) -> None:
    """With torch's operations over lists of tensors."""
    model.train()
    optimizer, parameters = _sgd(model.parameters()), list(model.parameters())
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            kept = [parameter.detach().clone() for parameter in parameters]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_add_(parameters, torch._foreach_mul(gradients, 0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            torch._foreach_copy_(parameters, kept)
        optimizer.step()


def distillation(model: nn.Module, batches: Iterable[Batch]) -> None:
    """A teacher's outputs, with torch's divergence."""
    model.train()
    teacher, optimizer = _teacher(), _sgd(model.parameters())
    for images, labels in batches:
        optimizer.zero_grad()
        logits = model(images)
        with torch.no_grad():
            wanted = F.log_softmax(teacher(images) / 2, 1)
        soft = F.kl_div(F.log_softmax(logits / 2, 1), wanted, reduction="batchmean", log_target=True)
        (0.5 * F.cross_entropy(logits, labels) + 0.5 * 4 * soft).backward()
        optimizer.step()


def _teacher() -> nn.Module:
    return small_resnet(in_channels=3).eval().requires_grad_(False)


def colout(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """With sorted random rows and columns."""
    rows, columns = (torch.randperm(size)[: int(0.85 * size)].sort().values for size in images.shape[-2:])
    return images[:, :, rows[:, None], columns], labels


def cutout(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A square of half the side for each image."""
    images, half = images.clone(), images.shape[-1] // 4
    for image, (y, x) in zip(images, torch.randint(images.shape[-1], (len(images), 2)).tolist(), strict=True):
        image[:, max(0, y - half) : y + half, max(0, x - half) : x + half] = 0
    return images, labels


def cutmix(images: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """One box for the batch."""
    partners, side = torch.randperm(len(images)), images.shape[-1]
    cut = int(side * (1 - float(torch.rand(()))) ** 0.5)
    y, x = (int(torch.randint(side, ())) for _ in range(2))
    rows, columns = (slice(max(0, at - cut // 2), min(side, at + cut // 2)) for at in (y, x))
    mixed = images.clone()
    mixed[:, :, rows, columns] = images[partners][:, :, rows, columns]
    share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / side**2
    return mixed, (labels, labels[partners], share)


def mixup(images: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """One share for the batch."""
    partners, share = torch.randperm(len(images)), float(torch.distributions.Beta(0.2, 0.2).sample())
    return torch.lerp(images[partners], images, share), (labels, labels[partners], share)


def loss_of_mixture(logits: Tensor, targets: Any) -> Tensor:
    """Of both labels."""
    first, second, share = targets
    return share * F.cross_entropy(logits, first) + (1 - share) * F.cross_entropy(logits, second)


def halved(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Images of half the side."""
    return F.interpolate(images, scale_factor=0.5, mode="bilinear", antialias=False), labels


def channels_last(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Weights and images."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain(model, batches, change=lambda images, labels: (images.to(memory_format=torch.channels_last), labels))


def changed(change: Any, loss: Any = F.cross_entropy) -> Loop:
    """The plain loop over changed batches."""
    return lambda model, batches: plain(model, batches, change=change, loss=loss)


#: Algorithm -> its arguments, and loops by hand, the fastest of which counts.
LOOPS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[Loop, ...]]] = {
    "activation-checkpointing": (dict, (surgery(gf.checkpoint_activations),)),
    "blurpool": (dict, (surgery(vf.blurpool),)),
    "channels-last": (dict, (channels_last,)),
    "colout": (dict, (changed(colout),)),
    "cutmix": (dict, (changed(cutmix, loss_of_mixture),)),
    "cutout": (dict, (changed(cutout),)),
    "distillation": (lambda: {"teacher": _teacher()}, (distillation,)),
    "ema": (lambda: {"smoothing": 0.999}, (averaged_by_torch(get_ema_multi_avg_fn(0.999), True), ema_lerp)),
    "ghost-batchnorm": (dict, (surgery(gf.ghost_batchnorm),)),
    "gradient-clipping": (lambda: {"kind": "norm", "threshold": 1.0}, (clipping,)),
    "label-smoothing": (dict, (smoothing,)),
    "mixup": (dict, (changed(mixup, loss_of_mixture),)),
    "progressive-resizing": (lambda: {"delay_fraction": 1.0, "finetune_fraction": 0.0}, (changed(halved),)),
    "sam": (dict, (sam,)),
    "squeeze-excite": (
        lambda: {"min_channels": 16},
        (surgery(lambda model: vf.squeeze_excite(model, min_channels=16)),),
    ),
    "swa": (lambda: {"start": "0dur", "update_interval": "1ba"}, (averaged_by_torch(get_swa_multi_avg_fn(), False),)),
    "weight-standardization": (dict, (surgery(gf.weight_standardization),)),
}


class _Watch:
    """Batches in memory; notes when each is asked for."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.rand(32, 3, 32, 32, generator=generator), torch.randint(10, (32,), generator=generator))
            for _ in range(STEPS)
        ]
        self.times: list[float] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.times.append(time.perf_counter())
            yield batch

    @property
    def step(self) -> float:
        """Seconds of the median step, the first ones omitted."""
        return median(later - earlier for earlier, later in pairwise(self.times[WARMUP:]))


def run(repeats: int) -> dict[str, Any]:
    """The ratio for each algorithm; both loops in turns, in one process with one thread."""
    rows = [["ResNet with 16 to 64 channels, 32 × 3 × 32 × 32, 1 thread", "÷ the loop by hand", "its step, ms"]]
    ratios: dict[str, list[float]] = {}
    torch.set_num_threads(1)
    model = small_resnet(in_channels=3)
    for name, (arguments, loops) in LOOPS.items():
        ratio, by_hand = Series(), Series()
        for repeat in range(repeats + 1):
            watch = _Watch()
            _fit(name, arguments(), copy.deepcopy(model), watch)
            others = []
            for loop in loops:
                other = _Watch()
                loop(copy.deepcopy(model), other)
                others.append(other.step)
            if repeat:  # the first one warms up
                ratio.values.append(watch.step / min(others))
                by_hand.values.append(min(others) * 1e3)
        ratios[name] = ratio.values
        rows.append([name, str(ratio), str(by_hand)])
    return {"ratio": ratios, "table": table(rows)}


def _fit(name: str, arguments: dict[str, Any], model: nn.Module, batches: Any) -> None:
    hocket.Trainer(
        model=model,
        loss=F.cross_entropy,
        train_data=batches,
        optimizer=_sgd,
        duration="1ep",
        algorithms=[{name: arguments}],
        seed=0,
        device="cpu",
    ).fit()


if __name__ == "__main__":
    print(run(5)["table"])
