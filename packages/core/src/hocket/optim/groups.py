"""Parameter groups of an optimizer that is given by name: options by pattern, and layer-wise learning-rate decay."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.basics.plain_data import json_like
from hocket.basics.plugin_errors import PluginConfigError
from hocket.help import optional_packages
from hocket.state.task import Task

#: The options of a configuration that `make_groups` takes; the others are arguments of the optimizer.
OPTIONS = ("groups", "layer_decay")
#: The option of a group by which `scale_rates` multiplies its learning rate.
_SCALE = "lr_scale"
#: What it multiplies; ``base_lr`` is the option to which an optimizer relates its learning rate, as decoupled-adamw does.
_RATES = {"lr", "base_lr"}
#: The options of a single group that the plan shows.
_SHOWN = ("lr", "weight_decay")


def make_groups(
    part: nn.Module,
    groups: object = None,
    layer_decay: float | None = None,
    routes: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups of ``part``: parameters with equal options together, in the order of the parameters.

    Args:
        part: a model, or a task, whose model's parameters go by their names in the model.
        groups: a list of ``{"match": pattern, option: value, …}``. A pattern is a glob for names (``"*.bias"``), or ``"1d"``
            for parameters with at most one dimension (biases and the weights of norms); ``match`` may be a list of them. The
            first group that matches a parameter gives it its options; the others keep those of the optimizer.
        layer_decay: multiply the learning rate of layer i of n by ``layer_decay ** (n - i)``; see `layers` of hocket_general.
        routes: further options by the names of parameters, which groups override.

    Raises:
        PluginConfigError: a group is not such a dict, or no parameter is left for it; or ``layer_decay`` is not in (0, 1], or
            the model has no repeated blocks.
    """
    parameters = dict(named_parameters(part))
    options = {name: dict((routes or {}).get(name, {})) for name in parameters}
    taken: set[str] = set()
    for group in check_groups(groups):
        patterns = [group["match"]] if isinstance(group["match"], str) else group["match"]
        for pattern in patterns:
            check_pattern(pattern, parameters)
        matched = [name for name, item in parameters.items() if any(matches(name, item, p) for p in patterns)]
        if taken.issuperset(matched):
            raise PluginConfigError(
                f"The group {group!r} gets no parameter: groups before it match all of {_some(matched)}, and the first match "
                "wins. Move it up, or remove it."
            )
        for name in matched:
            if name not in taken:
                options[name] |= {key: value for key, value in group.items() if key != "match"}
        taken.update(matched)
    if layer_decay is not None:
        for name, factor in _factors(part, list(parameters), layer_decay).items():
            options[name][_SCALE] = factor
    merged: list[dict[str, Any]] = []
    for name, parameter in parameters.items():
        if not (same := [group for group in merged if _options(group) == options[name]]):
            merged += (same := [{"params": [], **options[name]}])
        same[0]["params"].append(parameter)
    return merged


def scale_rates(optimizer: Optimizer) -> None:
    """Multiply the learning rates by the factors of `make_groups`, and check its options.

    Raises PluginConfigError for an option of a group that is not one of the optimizer.
    """
    known = {*optimizer.defaults, "params", _SCALE}
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, str) and isinstance(optimizer.defaults.get(key), int | float):
                raise PluginConfigError(
                    f"A group has {key}={value!r}, which is text. Write a number, such as 1.0e-3 in YAML."
                )
        for key in group.keys() - known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            raise PluginConfigError(
                f"A group of {type(optimizer).__name__} has the option {key!r}, which is not one of "
                f"{', '.join(sorted(optimizer.defaults))}.{f' Write {near[0]!r}.' if near else ''}"
            )
        factor = group.pop(_SCALE, 1.0)
        for rate in _RATES & group.keys():
            group[rate] = group[rate] * factor


def named_parameters(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters by name: those of a task's model by their names in the model."""
    model = part.model if isinstance(part, Task) else part
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = set(names.values())
    for name, parameter in part.named_parameters():
        yield names.get(id(parameter)) or (f"task.{name}" if name in taken else name), parameter


def described(optimizers: Mapping[str, Optimizer], part: nn.Module) -> str:
    """Return a line for each optimizer, and for each group of those with several, with the options in which they differ."""
    names = {id(parameter): name for name, parameter in named_parameters(part)}
    lines = []
    for name, optimizer in optimizers.items():
        kind = type(optimizer).__name__ if name.isdecimal() else f"{name}: {type(optimizer).__name__}"
        groups = optimizer.param_groups
        if len(groups) == 1:
            values = _values(groups[0], [key for key in _SHOWN if key in groups[0]])
            lines.append(f"{', '.join(filter(None, (kind, values)))} ({_size(groups[0])})")
            continue
        keys = [
            key for key in groups[0] if key != "params" and any(group.get(key) != groups[0][key] for group in groups)
        ]
        lines.append(f"{kind}, {len(groups)} groups of parameters")
        for group in groups:
            held = [names.get(id(parameter), "?") for parameter in group["params"]]
            lines.append(f"  {_values(group, keys) or 'equal options'}: {_some(held)} ({_size(group)})")
    return f"\n{'':<12}".join(lines)


def _values(group: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={_short(group.get(key))}" for key in keys)


def _size(group: Mapping[str, Any]) -> str:
    return f"{sum(parameter.numel() for parameter in group['params']):,} parameters"


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def matches(name: str, parameter: Tensor, pattern: str) -> bool:
    """Whether a glob matches the name of a parameter; ``"1d"`` matches parameters of at most one dimension."""
    if pattern == "1d":
        return parameter.ndim <= 1
    return fnmatchcase(name, pattern) or fnmatchcase(
        f".{name}", pattern
    )  # "*.bias" is also the bias of the model itself


def check_groups(groups: object) -> Sequence[Mapping[str, Any]]:
    """Return the ``groups`` of a configuration. Raises PluginConfigError for one without a pattern or without options."""
    if groups is None:
        return ()
    form = "Write «groups=[{'match': '*.bias', 'weight_decay': 0}]», with names of the model's parameters or globs for them."
    if not isinstance(groups, list | tuple):
        raise PluginConfigError(f"«groups={groups!r}» is {type(groups).__name__}, not a list of groups. {form}")
    for group in groups:
        match = group.get("match") if isinstance(group, Mapping) else None
        names = [match] if isinstance(match, str) else match
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            raise PluginConfigError(f"The group {group!r} does not say which parameters it matches. {form}")
        if len(group) == 1 or "params" in group:
            raise PluginConfigError(
                f"The group {group!r} needs options besides 'match', such as lr or weight_decay. {form}"
            )
    return groups


def check_pattern(pattern: str, parameters: Mapping[str, nn.Parameter], option: str = "match") -> None:
    """Raise PluginConfigError if the pattern of an option matches no parameter."""
    if any(matches(name, parameter, pattern) for name, parameter in parameters.items()):
        return
    word = pattern.strip("*.")
    write = {part: f"*{part}*" for name in parameters for part in name.split(".") if not part.isdigit()}
    for name in parameters:
        write |= {each: f"{each}.*" for each in (name.partition(".")[0], name.rpartition(".")[0])} | {name: name}
    tops = dict.fromkeys(name.partition(".")[0] for name in parameters)
    near = difflib.get_close_matches(word, list(write), 3, 0.5) or list(tops)[-3:]
    names = " or ".join(repr(write[each]) for each in near)
    raise PluginConfigError(f"«{option}={pattern!r}» matches none of the {len(parameters)} parameters. Write {names}.")


def _factors(part: nn.Module, names: Sequence[str], decay: object) -> dict[str, float]:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
        raise PluginConfigError(
            f"«layer_decay={decay!r}» is not a factor per layer: give a number in (0, 1], such as 0.75."
        )
    model = part.model if isinstance(part, Task) else part
    layers = optional_packages.module("hocket_general.layer_order", "layer_decay=").layers(model, names)
    if not layers:
        raise PluginConfigError(
            f"«layer_decay={decay}» needs blocks that repeat, such as the items of a ModuleList or block_1 and block_2 of one "
            f"class, and {type(model).__name__} has none; its parameters are {_some(names)}. Use "
            "«groups=[{'match': …, 'lr': …}]» with a learning rate for each part."
        )
    last = max(layers.values())
    return {name: float(decay) ** (last - layer) for name, layer in layers.items()}


def hyperparameters(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the hyperparameters of every parameter group as text, by keys such as ``"optimizers.0.lr"``."""
    values: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            place = f"optimizers.{number}" + (f".group{index}" if len(optimizer.param_groups) > 1 else "")
            values |= {f"{place}.{name}": repr(json_like(value)) for name, value in group.items() if name != "params"}
    return values
