"""Compare the arguments of all ranks before using them. Otherwise ranks would train different models, or deadlock."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.basics.plugin_errors import PluginError
from hocket.data.adapters import CombinedLoaders
from hocket.errors import WrongValue

if TYPE_CHECKING:
    from hocket.hookspecs.attachment import Attachment
    from hocket.hookspecs.bus import BusLike
    from hocket.loop.settings import Settings
    from hocket.state.state import State

#: Descriptions of the arguments by name, each as lines that are compared one by one.
Given = Mapping[str, Sequence[str]]


def over_ranks(bus: BusLike, world_size: int, given: Given) -> None:
    """Check that all ranks were given the same arguments. Every rank has to call it; it costs one collective.

    Raises:
        PluginError: ranks attached different plug-ins.
        ValueError: any other argument differs; the message names it.
    """
    if world_size == 1:
        return
    digests = {name: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for name, lines in given.items()}
    everyone = bus.all_gather_object(digests)
    differing = [name for name in digests if any(other.get(name) != digests[name] for other in everyone)]
    if not any(other != everyone[0] for other in everyone):
        return
    first, *others = bus.all_gather_object({name: list(given[name]) for name in differing})
    for rank, theirs in enumerate(others, 1):
        texts = [
            _difference(name, lines, theirs.get(name, [])) for name, lines in first.items() if lines != theirs.get(name)
        ]
        if "plug-ins" in first and first["plug-ins"] != theirs.get("plug-ins"):
            raise PluginError(
                f"Rank {rank} attached different plug-ins from rank 0: {'; '.join(texts)}. Start every process with the same "
                "arguments and the same installed packages."
            )
        if texts:
            raise WrongValue(
                f"Rank {rank} was given different arguments from rank 0: {'; '.join(texts)}. Give all ranks the same; "
                "docs/reference/strategies.md lists what may differ."
            )
    raise WrongValue(
        "Ranks call different methods of the Trainer. Every rank has to call the same methods in the same order."
    )


def _difference(name: str, first: Sequence[str], theirs: Sequence[str]) -> str:
    missing = [line for line in first if line not in theirs]
    extra = [line for line in theirs if line not in first]
    if not missing and not extra:
        return f"{name}: different order"
    shown = [
        ", ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "") for lines in (extra, missing)
    ]
    return f"{name}: {shown[0] or 'nothing'} instead of {shown[1] or 'nothing'}"


def of_plugins(attachments: Sequence[Attachment]) -> Given:
    """Describe plug-ins by name, version and configuration."""
    return {"plug-ins": [f"{v.kind} {v.name} ({v.dist} {v.version}) {text(dict(v.config))}" for v in attachments]}


def of_values(given: Mapping[str, Any]) -> Given:
    """Describe values by name."""
    return {name: [text(value)] for name, value in given.items()}


def of_settings(settings: Settings, model: nn.Module) -> Given:
    """Describe the settings of a Trainer that have to be identical on all ranks, and the shapes of the model."""
    presence = {name: ["given"] if given else [] for name, given in settings.given_on_all_ranks().items()}
    presence["train_data"] = of_data(settings.train_data)
    return {**of_values(settings.of_all_ranks()), **presence, "model": shapes(model)}


def of_data(data: object) -> list[str]:
    """Describe training data: how several loaders are combined, and of other data whether there is any."""
    return [] if data is None else [repr(data) if isinstance(data, CombinedLoaders) else "given"]


def shapes(model: nn.Module) -> list[str]:
    """Describe the parameters and buffers of a model, and which parameters are frozen."""
    parameters = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
        for name, parameter in model.named_parameters()
    ]
    # Nested tensors have no shape.
    shapes = (
        (name, "nested" if item.is_nested else tuple(item.shape), item.dtype) for name, item in model.named_buffers()
    )
    return parameters + [f"{name} {shape} {dtype}" for name, shape, dtype in shapes]


def of_assembled(state: State) -> Given:
    """Describe the objects made from the arguments: optimizers with their settings, and evaluation sets."""
    optimizers = [
        f"{type(optimizer).__name__} of {len(group['params'])} parameters, "
        + text({key: value for key, value in group.items() if key != "params"})
        for optimizer in state.optimizers
        for group in optimizer.param_groups
    ]
    return {"optimizer": optimizers, "eval_data": of_sets(state.eval_sets)}


def of_sets(sets: Mapping[str, Any]) -> list[str]:
    """Describe evaluation sets by label, interval, limit and the names of metrics."""
    return [
        f"'{label}' every {eval_set.every!r}, {eval_set.limit} batches, {sorted(eval_set.metrics.names)}"
        for label, eval_set in sets.items()
    ]


def text(value: object) -> str:
    """Describe a value identically in every process. Functions, and objects without a custom repr, are given by name."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(text(item) for item in value) + "]"
    if isinstance(value, functools.partial):
        return f"{text(value.func)}({text(value.args)}, {text(value.keywords)})"
    if name := getattr(value, "__qualname__", None):
        return str(name)
    if isinstance(value, nn.Module) or type(value).__repr__ is object.__repr__:
        return type(value).__qualname__
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
