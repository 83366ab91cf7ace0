"""Activation checkpointing: recompute the activations of blocks in the backward pass instead of keeping them.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174; by operation: Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, section 5.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Replacement, why_no_effect

if TYPE_CHECKING:
    from hocket.state.state import State

#: "auto", or classes, names of classes, or patterns of names of modules.
Blocks = str | type[nn.Module] | Sequence[str | type[nn.Module]]

#: What ``save="matmuls"`` stands for: the operations that cost most to compute.
_MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


class _Recomputed:
    """The forward of a block, as an attribute of the block: neither its class nor the names of its parameters change.

    A recomputation repeats the forward pass and leaves no trace: it sees buffers (running statistics, vectors of spectral
    norm) and random generators that modules hold as they were before the forward pass, and changes copies of them.
    """

    def __init__(self, block: nn.Module, save: tuple[str, ...]) -> None:
        self.block, self.save = block, save
        self.inner = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner or partial(type(self.block).forward, self.block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        selective: dict[str, Any] = {"context_fn": partial(_contexts, self.save)} if self.save else {}
        run = partial(_run, _Before(), self.block, forward)
        return checkpoint(run, *args, use_reentrant=False, **selective, **kwargs)


class _Before:
    """What a recomputation has to find as it was before the forward pass."""

    def __init__(self) -> None:
        self.known = False
        self.buffers: dict[tuple[nn.Module, str], Tensor] = {}
        self.generators: list[tuple[torch.Generator, Tensor]] = []


def _run(before: _Before, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` and note what it changes; the next times, repeat that call without side effects."""
    if before.known:
        with _buffers(before.buffers), _states(before.generators):
            return forward(*args, **kwargs)
    parts = list(block.modules())
    generators = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Generator)]
    before.generators = [(generator, generator.get_state()) for generator in generators]
    buffers = {(part, name): buffer for part in parts for name, buffer in part._buffers.items() if buffer is not None}
    copies = {slot: (buffer, buffer._version, buffer.clone()) for slot, buffer in buffers.items()}
    outputs = forward(*args, **kwargs)
    before.known = True
    for (part, name), (buffer, version, copy) in copies.items():
        # Kernels of batch norm change running statistics without a new version.
        norm = isinstance(part, nn.modules.batchnorm._NormBase)
        if norm or part._buffers.get(name) is not buffer or buffer._version != version:
            before.buffers[part, name] = copy
    return outputs


def _compiled(before: _Before, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a compiler sees of `_run`: it records changes of buffers once. Code that it cannot compile calls `_run`."""
    return forward(*args, **kwargs)


@functools.cache
def _teach_compiler() -> None:
    torch.compiler.substitute_in_graph(_run, skip_signature_check=True)(_compiled)


@contextmanager
def _buffers(values: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Let modules hold copies of ``values`` in place of their buffers."""
    current = {(part, name): part._buffers[name] for part, name in values}
    for (part, name), value in values.items():
        part._buffers[name] = value.clone()
    try:
        yield
    finally:
        for (part, name), buffer in current.items():
            part._buffers[name] = buffer


@contextmanager
def _states(values: Sequence[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    """Let generators draw from these states on, and then continue from where they were."""
    current = [(generator, generator.get_state()) for generator, _ in values]
    for generator, state in values:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in current:
            generator.set_state(state)


# --- selection of operations


def _contexts(save: Sequence[str]) -> Any:
    overloads = [getattr(packet, each) for packet in map(_operation, save) for each in packet.overloads()]
    return create_selective_checkpoint_contexts(overloads)


def _operation(name: str) -> Any:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        raise WrongValue(
            f"save has {name!r}, which is no operation of torch.ops.aten. Give names such as 'mm', 'addmm', 'bmm', "
            "'convolution', or «save='matmuls'» for all matrix products, convolutions and attention."
        )
    overload = getattr(packet, packet.overloads()[0])
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"):
        raise WrongValue(
            f"save has {name!r}, which torch composes of other operations, so that it has no output to save. Name those: "
            "'linear' is 'addmm' and 'mm', 'matmul' is 'mm' and 'bmm', 'conv2d' is 'convolution'."
        )
    return packet


def _names(save: str | Sequence[str] | None) -> tuple[str, ...]:
    names = () if save is None else _MATMULS if save == "matmuls" else (save,) if isinstance(save, str) else tuple(save)
    for name in names:
        _operation(name)
    return names


# --- selection of blocks


def _choose(model: nn.Module, blocks: Blocks, every: int) -> dict[str, nn.Module]:
    """Return every ``every``-th of the blocks that are in no other, by name. Raises ValueError if one is not found."""
    named = {name: part for name, part in model.named_modules() if name}
    if blocks == "auto":
        found = _automatic(model)
    else:
        found = set()
        for each in [blocks] if isinstance(blocks, str | type) else blocks:
            matched = {part for name, part in named.items() if _is(name, part, each)}
            if not matched:
                classes = ", ".join(sorted({type(part).__name__ for part in named.values()}))
                raise WrongValue(
                    f"«blocks={blocks!r}»: the model has no module of the class or the name {each!r}. Its classes are "
                    f"{classes}; patterns of names are like 'encoder.layers.*'."
                )
            found |= matched
    inside = {part for block in found for part in block.modules() if part is not block}
    chosen = [(name, part) for name, part in named.items() if part in found and part not in inside]
    return {name: part for name, part in chosen[::every] if not _is_recomputed(part)}


def _is_recomputed(part: nn.Module) -> bool:
    return isinstance(vars(part).get("forward"), _Recomputed)


def _is(name: str, part: nn.Module, given: str | type[nn.Module]) -> bool:
    if isinstance(given, type):
        return isinstance(part, given)
    return fnmatchcase(name, given) or given in (base.__name__ for base in type(part).__mro__)


def _automatic(model: nn.Module) -> set[nn.Module]:
    """Return the blocks that the model declares, else the modules with submodules that repeat in a list or sequence."""
    declared = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    if found := {part for part in model.modules() if type(part).__name__ in declared} - {model}:
        return found
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            composed = [part for part in container if any(True for _ in part.children())]
            kinds = Counter(map(type, composed))
            found |= {part for part in composed if kinds[type(part)] > 1}
    return found


def checkpoint_activations(
    model: nn.Module, *, blocks: Blocks = "auto", every: int = 1, save: str | Sequence[str] | None = None
) -> tuple[nn.Module, list[Replacement]]:
    """Recompute the forward pass of blocks in backward, instead of keeping their activations, in place.

    Outputs, gradients and random numbers are bitwise those of the model without it. Buffers that a forward pass changes,
    such as batch norm's running statistics, are changed once. The names of parameters, the classes of blocks and their hooks
    stay; hooks on a block run once, hooks on modules inside it run again in the recomputation. Nothing is recomputed where
    no gradients are. Attributes other than buffers and ``torch.Generator`` that a forward pass changes, are changed twice.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), with torch's non-reentrant
    ``torch.utils.checkpoint``.

    Args:
        model: any module; blocks are submodules.
        blocks: ``"auto"`` for the classes that the model declares in ``_no_split_modules`` (transformers), else for the
            modules with submodules whose class repeats in a ModuleList or Sequential; classes, names of classes, or
            patterns of module names such as ``"layers.*"``. Blocks within blocks are not recomputed on their own.
        every: recompute every n-th block, beginning with the first, and keep the activations of the others.
        save: operations whose outputs are kept: names in ``torch.ops.aten``, or ``"matmuls"`` for matrix products,
            convolutions and attention. None keeps only the inputs of a block.

    Returns:
        The model and a record of each block, whose ``old`` and ``new`` are the block itself; the list is empty if the model
        has no blocks, with a NoEffectWarning.

    Raises:
        ValueError: ``every`` is less than 1, a block is not in the model, or an operation has no output to save.

    Example:
        >>> import torch
        >>> from hocket_general.functional import checkpoint_activations
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
        >>> model, changed = checkpoint_activations(torch.nn.TransformerEncoder(layer, 4), every=2)
        >>> [each.name for each in changed]
        ['layers.0', 'layers.2']
    """
    names = _checked(every, save)
    chosen = _choose(model, blocks, every)
    _teach_compiler()
    for part in chosen.values():
        part.forward = _Recomputed(part, names)  # type: ignore[method-assign]  # a wrapper would rename parameters
    if not chosen:
        lacking = (
            "no modules of one class with submodules repeat in a ModuleList or Sequential. Name them, as in "
            "«blocks=['Block']» or «blocks=['layers.*']»."
        )
        applied = {name: part for name, part in model.named_modules() if _is_recomputed(part)}
        warn(why_no_effect("ActivationCheckpointing", model, lacking, applied), NoEffectWarning)
    return model, [Replacement(name, part, part, model) for name, part in chosen.items()]


def _checked(every: int, save: str | Sequence[str] | None) -> tuple[str, ...]:
    if every < 1:
        raise WrongValue(f"«every={every}» is no number of blocks: give 1 for all, 2 for every second one, and so on.")
    return _names(save)


class ActivationCheckpointing(Algorithm):
    """Recompute blocks of the model in backward instead of keeping their activations (Chen et al. 2016, arXiv 1604.06174).

    Changes the model once, after all other surgery; the arguments are those of :func:`checkpoint_activations`. Trains
    bitwise as without it, in less memory and more time. Logs the number of blocks as ``activation-checkpointing/blocks``.

    Example:
        >>> import hocket, hocket_general, torch
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(3)]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Sequential(*layers), device="cpu",
        ...     algorithms=[hocket_general.ActivationCheckpointing(save="matmuls")],
        ... )
    """

    events = {Event.INIT}
    phase = Phase.PRECISION  # its changes to blocks are not seen by surgery, so it is the last
    after = ("low-precision-groupnorm", "low-precision-layernorm")

    def __init__(self, blocks: Blocks = "auto", every: int = 1, save: str | Sequence[str] | None = None) -> None:
        _checked(every, save)
        self.blocks, self.every, self.save = blocks, every, save

    def apply(self, event: Event, state: State) -> None:
        """Change the forward of blocks."""
        _, changed = checkpoint_activations(state.model, blocks=self.blocks, every=self.every, save=self.save)
        state.log({"activation-checkpointing/blocks": len(changed)})

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each block that would be recomputed."""
        return [
            f"{name}: {type(part).__name__} recomputed in backward"
            for name, part in _choose(model, self.blocks, self.every).items()
        ]
