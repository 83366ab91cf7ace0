"""For every algorithm the loops by hand that do the same, as a good engineer would write them with torch alone."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from hocket.surgery import Policy, replace_modules
from hocket_general import functional as gf
from hocket_vision import functional as vf
from hocket_vision.models import small_resnet

Batches = Sequence[Any]
Loop = Callable[[nn.Module, Batches], None]


# --- what is trained


@dataclass(frozen=True)
class Bed:
    """A model, its batches and its loss, None for the model's own; ``batches(number)`` are the same ones each time."""

    model: Callable[[], nn.Module]
    batches: Callable[[int], list[Any]]
    loss: Callable[[Tensor, Tensor], Tensor] | None = F.cross_entropy
    precision: str = "fp32"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all loops."""
    return torch.optim.SGD(parameters, lr=0.01)


def images(number: int, size: int = 32, side: int = 32) -> list[Any]:
    """Batches of images in [0, 1], class indices and indices in the data set."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.rand(size, 3, side, side, generator=generator),
            torch.randint(10, (size,), generator=generator),
            torch.arange(size) + index * size,
        )
        for index in range(number)
    ]


def texts(number: int, size: int = 8, length: int = 64) -> list[Any]:
    """Batches of tokens, as inputs and as labels."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(256, (size, length), generator=generator) for _ in range(number)]
    return [(each, each) for each in tokens]


def documents(number: int, size: int = 8, length: int = 64) -> list[dict[str, Tensor]]:
    """Batches of documents from an eighth of the length on, padded, for models that compute their loss."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(number):
        tokens = torch.randint(256, (size, length), generator=generator)
        lengths = torch.randint(length // 8, length + 1, (size, 1), generator=generator)
        mask = (torch.arange(length) < lengths).long()
        batches.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)})
    return batches


def gpt() -> nn.Module:
    """A small GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": 256}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **drop))
    return model


class Language(nn.Module):
    """A small GPT-2 of transformers that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, L, vocabulary)``."""
        logits: Tensor = self.gpt(tokens).logits
        return logits


class Rotary(nn.Module):
    """A small GPT-NeoX of transformers that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 512}
        self.gpt = GPTNeoXForCausalLM(
            GPTNeoXConfig(**sizes, max_position_embeddings=64, vocab_size=256, bos_token_id=0, eos_token_id=0)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, L, vocabulary)``."""
        logits: Tensor = self.gpt(tokens).logits
        return logits


def language_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over positions; which token it is does not matter here."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def resnet() -> nn.Module:
    """16 to 64 channels."""
    return small_resnet(in_channels=3)


def with_group_norm() -> nn.Module:
    """The same with group norm."""
    model = resnet()
    replace_modules(model, {nn.BatchNorm2d: Policy(lambda old, index: nn.GroupNorm(8, old.num_features))})
    return model


def with_dropout() -> nn.Module:
    """The same with dropout before the classifier."""
    model = resnet()
    model.flatten = nn.Sequential(nn.Flatten(), nn.Dropout(0.5))
    return model


BEDS = {
    "documents": Bed(gpt, documents, None),
    "images": Bed(resnet, images),
    "images, dropout": Bed(with_dropout, images),
    "images, group norm, bf16": Bed(with_group_norm, images, precision="bf16"),
    "texts": Bed(Language, texts, language_loss),
    "texts, rotary": Bed(Rotary, texts, language_loss),
    "texts, bf16": Bed(Language, texts, language_loss, precision="bf16"),
}


# --- loops


def plain(
    model: nn.Module,
    batches: Batches,
    *,
    begin: Callable[[float], Any] = lambda done: None,
    change: Callable[..., tuple[Any, Any]] | None = None,
    loss: Callable[[Tensor, Any], Tensor] = F.cross_entropy,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before_step: Callable[[], Any] = lambda: None,
    after_step: Callable[[], Any] = lambda: None,
) -> None:
    """The loop that anyone would write, with what a method adds to it. ``begin`` gets the completed fraction."""
    model.train()
    optimizer = sgd(model.parameters())
    for index, (inputs, targets, *rest) in enumerate(batches):
        begin(index / len(batches))
        if change is not None:
            inputs, targets = change(inputs, targets, *rest)
        optimizer.zero_grad()
        with context():
            value = loss(model(inputs), targets)
        value.backward()
        before_step()
        optimizer.step()
        after_step()


def with_changed_model(change: Callable[[nn.Module], Any], **arguments: Any) -> Loop:
    """The plain loop over the model that the functional form makes."""

    def loop(model: nn.Module, batches: Batches) -> None:
        change(model)
        plain(model, batches, **arguments)

    return loop


def with_changed_batches(change: Callable[..., Any], loss: Any = F.cross_entropy) -> Loop:
    """The plain loop over changed batches."""
    return partial(plain, change=lambda images, labels, *rest: change(images, labels), loss=loss)


def autocast() -> AbstractContextManager[Any]:
    """What the precision bf16 does."""
    return torch.autocast("cpu", torch.bfloat16)


def averaged_by_torch(average: Any, buffers: bool) -> Loop:
    """With torch's AveragedModel."""

    def loop(model: nn.Module, batches: Batches) -> None:
        averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=buffers)
        plain(model, batches, after_step=lambda: averaged.update_parameters(model))

    return loop


def ema_lerp(model: nn.Module, batches: Batches) -> None:
    """With one fused operation over parameters and buffers."""
    values = [value for value in model.state_dict(keep_vars=True).values() if value.is_floating_point()]
    averages = [value.detach().clone() for value in values]

    @torch.no_grad()
    def update() -> None:
        torch._foreach_lerp_(averages, values, 0.001)

    plain(model, batches, after_step=update)


def swa_lerp(model: nn.Module, batches: Batches) -> None:
    """The running mean with one fused operation over the parameters."""
    values = list(model.parameters())
    averages = [value.detach().clone() for value in values]
    number = 0

    @torch.no_grad()
    def update() -> None:
        nonlocal number
        number += 1
        torch._foreach_lerp_(averages, values, 1 / number)

    plain(model, batches, after_step=update)


def clipping(model: nn.Module, batches: Batches) -> None:
    """With torch's function."""
    parameters = list(model.parameters())
    plain(model, batches, before_step=lambda: nn.utils.clip_grad_norm_(parameters, 1.0))


def sam(model: nn.Module, batches: Batches) -> None:
    """With torch's operations over lists of tensors."""
    model.train()
    optimizer, parameters = sgd(model.parameters()), list(model.parameters())
    for inputs, targets, *_ in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            steps = torch._foreach_mul(gradients, 0.05 / (norm + 1e-12))
            torch._foreach_add_(parameters, steps)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, steps)
        optimizer.step()


def teacher() -> nn.Module:
    """The same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return resnet().eval().requires_grad_(False)


def distillation(model: nn.Module, batches: Batches) -> None:
    """A teacher's outputs, with torch's divergence."""
    model.train()
    knows, optimizer = teacher(), sgd(model.parameters())
    for inputs, targets, *_ in batches:
        optimizer.zero_grad()
        logits = model(inputs)
        with torch.no_grad():
            wanted = F.log_softmax(knows(inputs) / 2, 1)
        soft = F.kl_div(F.log_softmax(logits / 2, 1), wanted, reduction="batchmean", log_target=True)
        (0.5 * F.cross_entropy(logits, targets) + 0.5 * 4 * soft).backward()
        optimizer.step()


def batch_size_warmup(model: nn.Module, batches: Batches) -> None:
    """Several steps on parts of a batch: 4 at first, 2 over most of the run."""
    model.train()
    optimizer = sgd(model.parameters())
    for index, (inputs, targets, *_) in enumerate(batches):
        steps = math.ceil(1 / (0.25 + 0.75 * index / len(batches)) - 1e-9)
        for part, labels in zip(inputs.chunk(steps), targets.chunk(steps), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(part), labels).backward()
            optimizer.step()


def layer_freezing(model: nn.Module, batches: Batches) -> None:
    """From the first layer to the last but one, over the whole run."""
    layers = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]

    def freeze(done: float) -> None:
        for layer in layers[: int(done * (len(layers) - 1) + 1e-9)]:
            layer.requires_grad_(False)

    plain(model, batches, begin=freeze)


def loss_spike_guard(model: nn.Module, batches: Batches) -> None:
    """Compare each loss, one step later, with the median of the last 100; keep a copy of all state to roll back to."""
    model.train()
    optimizer = sgd(model.parameters())
    history: deque[float] = deque(maxlen=100)
    kept = [value.clone() for value in model.state_dict().values()], optimizer.state_dict()
    before: Tensor | None = None
    for inputs, targets, *_ in batches:
        if before is not None:
            value = before.item()
            if len(history) >= 2:
                middle = statistics.median(history)
                deviation = 1.4826 * statistics.median(abs(each - middle) for each in history)
                if not math.isfinite(value) or value - middle > 1e6 * max(deviation, 0.01 * abs(middle)):
                    torch._foreach_copy_(list(model.state_dict().values()), kept[0])
                    optimizer.load_state_dict(kept[1])
            history.append(value)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        before = loss.detach()
        loss.backward()
        optimizer.step()


def selective_backprop(model: nn.Module, batches: Batches) -> None:
    """Score without gradients in eval mode, then train on the half that is drawn by loss."""

    def select(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        model.eval()
        with torch.no_grad():
            order = F.cross_entropy(model(inputs), targets, reduction="none").argsort()
        model.train()
        chosen = order[torch.multinomial(torch.arange(1.0, len(order) + 1), len(order) // 2)].sort().values
        return inputs[chosen], targets[chosen]

    with_changed_batches(select)(model, batches)


def gyro_dropout(model: nn.Module, batches: Batches) -> None:
    """With the layers of the functional form, whose schedule is told how far the run is."""
    schedule = gf.GyroSchedule(sigma=8, tau=2)
    gf.gyro_dropout(model, schedule)

    def count(images: Tensor, labels: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        schedule.total = schedule.samples = len(images)
        return images, labels

    plain(model, batches, begin=lambda done: setattr(schedule, "elapsed", done), change=count)


def channels_last(model: nn.Module, batches: Batches) -> None:
    """Weights and images."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain(model, batches, change=lambda images, labels, *rest: (images.to(memory_format=torch.channels_last), labels))


def alternating_flip(model: nn.Module, batches: Batches) -> None:
    """With a table of random choices for the first epoch, by index in the data set."""
    mirrored = torch.rand(10_000) < 0.5

    def flip(images: Tensor, labels: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(mirrored[indices].view(-1, 1, 1, 1), images.flip(-1), images), labels

    plain(model, batches, change=flip)


def each_by_torchvision(name: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """One image after the other, so that each has its own draws."""
    from torchvision.transforms import v2

    transform = getattr(v2, name)()
    return lambda images, labels: (torch.stack([transform(image) for image in images]), labels)


def with_own_loss(
    change: Callable[[Any], Any] = lambda batch: batch, surgery: Callable[[nn.Module], Any] = lambda model: model
) -> Loop:
    """The loop over a model that computes its loss."""

    def loop(model: nn.Module, batches: Batches) -> None:
        surgery(model)
        model.train()
        optimizer = sgd(model.parameters())
        for batch in batches:
            optimizer.zero_grad()
            model(**change(batch)).loss.backward()
            optimizer.step()

    return loop


def packed(batch: dict[str, Tensor]) -> dict[str, Any]:
    """The longest document first, each into the first row with room; rows are padded together."""
    tokens, labels, lengths = batch["input_ids"], batch["labels"], batch["attention_mask"].sum(1).tolist()
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        for row in rows:
            if sum(lengths[each] for each in row) + lengths[index] <= tokens.shape[1]:
                row.append(index)
                break
        else:
            rows.append([index])

    def rows_of(document: Callable[[int, int], Tensor], padding: int) -> Tensor:
        joined = [torch.cat([document(index, lengths[index]) for index in row]) for row in rows]
        return nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=padding)

    ignored = torch.tensor([-100])
    return {
        "input_ids": rows_of(lambda index, length: tokens[index, :length], 1),
        "labels": rows_of(lambda index, length: torch.cat([ignored, labels[index, 1:length]]), -100),
        "position_ids": rows_of(lambda index, length: torch.arange(length), 0),
        "use_cache": False,
    }


# --- changes of batches


def colout(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """With sorted random rows and columns."""
    rows, columns = (torch.randperm(size)[: int(0.85 * size)].sort().values for size in images.shape[-2:])
    return images[:, :, rows[:, None], columns], labels


def cutout(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A square of half the side for each image, filled one after the other."""
    images, half = images.clone(), images.shape[-1] // 4
    for image, (y, x) in zip(images, torch.randint(images.shape[-1], (len(images), 2)).tolist(), strict=True):
        image[:, max(0, y - half) : y + half, max(0, x - half) : x + half] = 0
    return images, labels


def cutout_by_mask(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same with one mask for all images."""
    side = images.shape[-1]
    pixels, half = torch.arange(side), side // 4
    rows, columns = (
        (pixels >= centre - half) & (pixels < centre + half) for centre in torch.randint(side, (2, len(images), 1))
    )
    return images.masked_fill((rows[:, :, None] & columns[:, None])[:, None], 0), labels


def cutmix(images: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """One box for the batch, which is cropped before partners are gathered."""
    partners, side = torch.randperm(len(images)), images.shape[-1]
    cut = int(side * (1 - float(torch.rand(()))) ** 0.5)
    y, x = torch.randint(side, (2,)).tolist()
    rows, columns = (slice(max(0, at - cut // 2), min(side, at + cut - cut // 2)) for at in (y, x))
    mixed = images.clone()
    mixed[:, :, rows, columns] = images[:, :, rows, columns][partners]
    share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / side**2
    return mixed, (labels, labels[partners], share)


def mixup(images: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """One share for the batch."""
    partners, share = torch.randperm(len(images)), float(torch.distributions.Beta(0.2, 0.2).sample())
    return images[partners].lerp_(images, share), (labels, labels[partners], share)


def loss_of_mixture(logits: Tensor, targets: Any) -> Tensor:
    """Of both labels."""
    first, second, share = targets
    return share * F.cross_entropy(logits, first) + (1 - share) * F.cross_entropy(logits, second)


def halved(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Images of half the side, by the nearest pixels as the algorithm does."""
    return F.interpolate(images, scale_factor=0.5, mode="nearest"), labels


# --- all algorithms


@dataclass(frozen=True)
class Case:
    """How an algorithm is compared: its settings, what is trained, and loops by hand, of which the fastest counts."""

    loops: tuple[Loop, ...]
    settings: Callable[[], dict[str, Any]] = dict
    bed: str = "images"


@dataclass(frozen=True)
class Surgery(Case):
    """The loop by hand would have the same modules: it trains the model of the functional form, so the framework counts."""


def _alibi(model: nn.Module) -> Any:
    from hocket_nlp.functional import alibi

    return alibi(model, 64)


def _gated_linear_units(model: nn.Module) -> Any:
    from hocket_nlp.functional import gated_linear_units

    return gated_linear_units(model, "silu")


def _qk_norm(model: nn.Module) -> Any:
    from hocket_nlp.functional import qk_norm

    return qk_norm(model)


def _rope_scaling(model: nn.Module) -> Any:
    from hocket_nlp.functional import rope_scaling

    return rope_scaling(model, 4)


def seq_length_warmup(model: nn.Module, batches: Batches) -> None:
    """Slices of each batch, from 4 tokens to all of them in steps of 4."""
    done = 0.0

    def begin(share: float) -> None:
        nonlocal done
        done = share

    def change(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        length = 4 + int((tokens.shape[1] - 4) * done / 4 + 1e-9) * 4
        return tokens[:, :length].contiguous(), labels[:, :length].contiguous()

    plain(model, batches, begin=begin, change=change, loss=language_loss)


def _fused_cross_entropy(model: nn.Module) -> Any:
    from hocket_nlp.functional import fused_cross_entropy

    return fused_cross_entropy(model)


def _with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 1e-4 * logits.logsumexp(1).square().mean()


def _surgery(change: Callable[..., Any], bed: str = "images", **settings: Any) -> Surgery:
    arguments: dict[str, Any] = {}
    if BEDS[bed].loss is not F.cross_entropy:
        arguments["loss"] = BEDS[bed].loss
    if BEDS[bed].precision == "bf16":
        arguments["context"] = autocast
    return Surgery((with_changed_model(partial(change, **settings), **arguments),), lambda: settings, bed)


CASES: dict[str, Case] = {
    "activation-checkpointing": _surgery(gf.checkpoint_activations),
    "alibi": Surgery((with_changed_model(_alibi, loss=language_loss),), lambda: {"max_sequence_length": 64}, "texts"),
    "alternating-flip": Case((alternating_flip,), lambda: {"index_key": 2}),
    "augmix": Case((with_changed_batches(each_by_torchvision("AugMix")),), lambda: {"batch": True}),
    "batch-size-warmup": Case((batch_size_warmup,), lambda: {"initial": 0.25, "warmup": "1dur"}),
    "blurpool": _surgery(vf.blurpool),
    "channels-last": Case((channels_last,)),
    "colout": Case((with_changed_batches(colout),)),
    "cutmix": Case((with_changed_batches(cutmix, loss_of_mixture),)),
    "cutout": Case((with_changed_batches(cutout), with_changed_batches(cutout_by_mask))),
    "distillation": Case((distillation,), lambda: {"teacher": teacher()}),
    "ema": Case((averaged_by_torch(get_ema_multi_avg_fn(0.999), True), ema_lerp), lambda: {"smoothing": 0.999}),
    "factorize": _surgery(gf.factorize, min_channels=32),
    "gated-linear-units": Surgery(
        (with_changed_model(_gated_linear_units, loss=language_loss),), lambda: {"activation": "silu"}, "texts"
    ),
    "fused-cross-entropy": Surgery((with_own_loss(surgery=_fused_cross_entropy),), bed="documents"),
    "ghost-batchnorm": _surgery(gf.ghost_batchnorm, ghost_batch_size=8),
    "gradient-clipping": Case((clipping,), lambda: {"kind": "norm", "threshold": 1.0}),
    "gyro-dropout": Surgery((gyro_dropout,), lambda: {"sigma": 8, "tau": 2}, "images, dropout"),
    "label-smoothing": Case((partial(plain, loss=partial(F.cross_entropy, label_smoothing=0.1)),)),
    "layer-freezing": Case((layer_freezing,), lambda: {"start": "0dur"}),
    "loss-spike-guard": Case((loss_spike_guard,), lambda: {"warmup": 2, "threshold": 1e6}),
    "low-precision-groupnorm": _surgery(gf.low_precision_groupnorm, "images, group norm, bf16"),
    "low-precision-layernorm": _surgery(gf.low_precision_layernorm, "texts, bf16"),
    "mixup": Case((with_changed_batches(mixup, loss_of_mixture),)),
    "packing": Case((with_own_loss(packed),), bed="documents"),
    "progressive-resizing": Case(
        (with_changed_batches(halved),), lambda: {"delay_fraction": 1.0, "finetune_fraction": 0.0}
    ),
    "qk-norm": Surgery((with_changed_model(_qk_norm, loss=language_loss),), dict, "texts"),
    "randaugment": Case((with_changed_batches(each_by_torchvision("RandAugment")),), lambda: {"batch": True}),
    "rope-scaling": Surgery(
        (with_changed_model(_rope_scaling, loss=language_loss),), lambda: {"factor": 4}, "texts, rotary"
    ),
    "sam": Case((sam,)),
    "selective-backprop": Case((selective_backprop,), lambda: {"start": None, "stop": None, "interrupt": 0}),
    "seq-length-warmup": Case(
        (seq_length_warmup,), lambda: {"min_seq_length": 4, "step_size": 4, "warmup": "1dur"}, "texts"
    ),
    "squeeze-excite": _surgery(vf.squeeze_excite, min_channels=16),
    "stochastic-depth": _surgery(vf.stochastic_depth),
    "swa": Case(
        (averaged_by_torch(get_swa_multi_avg_fn(), False), swa_lerp),
        lambda: {"start": "0dur", "update_interval": "1ba"},
    ),
    "weight-standardization": _surgery(gf.weight_standardization),
    "z-loss": Case((partial(plain, loss=_with_z_loss),)),
}

#: Algorithms without a loop by hand, and why.
WITHOUT: dict[str, str] = {
    "no-op-model": "it leaves a step of no work, so that the ratio would be that of the table Step overhead",
}
