"""Adapters of peft, such as LoRA: a few weights that are trained beside those of a frozen model."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hocket.basics.plain_data import json_like
from hocket.errors import WrongType, WrongValue
from hocket.help import names, optional_packages, warn
from hocket.state.component import Check, Component, Saved
from hocket_nlp.projections import Finisher

#: Heads that are new and have to be trained, and what peft calls their tasks.
_HEADS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}

#: Arguments that name modules, and the names that peft itself adds to those of the heads.
_NAMES, _PEFTS_OWN = ("target_modules", "modules_to_save", "exclude_modules"), {"classifier", "score", "qa_outputs"}


def read_config(config: Any, model: nn.Module) -> Any:
    """Return a configuration of peft for a model.

    Args:
        config: the same, or the arguments of ``peft.LoraConfig`` (Hu et al. 2021, arXiv 2106.09685).
        model: of transformers, or any other.

    Raises:
        ImportError: peft is not installed.
        TypeError: ``config`` is neither, or has an argument that LoRA does not know, or one of another type.
        ValueError: the model has adapters already, or no module of a name; ``r`` or ``lora_alpha`` is not positive.
    """
    peft: Any = optional_packages.module("peft", "peft=")
    if isinstance(model, peft.PeftModel) or hasattr(model, "peft_config"):
        raise WrongValue(
            "The model has adapters already. Give one peft= whose target_modules names all modules, or the model without them."
        )
    if isinstance(config, Mapping):
        config = {key: _names(key, value) for key, value in config.items()}
        try:
            config = peft.LoraConfig(**config)
        except TypeError as error:
            known = inspect.signature(peft.LoraConfig).parameters
            odd = next((str(key) for key in config if key not in known), "")
            near = names.argument(odd, known) or names.closest(odd, known)
            why = f"it has no '{odd}'. Did you mean '{near}'?" if near else f"{error}."
            raise WrongType(
                f"«peft={dict(config)!r}» are no arguments of peft.LoraConfig: {why} Write for instance {_example(model)}."
            ) from error
    if not isinstance(config, peft.PeftConfig):
        raise WrongType(
            f"«peft={config!r}» is {type(config).__name__}. Give the arguments of LoRA, such as {_example(model)}, or a "
            "configuration of peft, such as «peft.IA3Config()¦`peft: {peft:IA3Config: {}}`»."
        )
    if config.peft_type == "LORA":
        _check_numbers(config)
    _check_names(config, model)
    if config.task_type is None:  # so that a new head is trained and saved beside the adapters
        kind = type(model).__name__
        config.task_type = next((task for name, task in _HEADS.items() if name in kind), None)
    return config


def matches(name: str, targets: Any) -> bool:
    """Whether peft's ``target_modules`` or ``modules_to_save`` mean the module of this name."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())


def _names(key: str, given: Any) -> Any:
    """Return names of modules as text, which YAML reads as numbers in ``[0, 4]``, and a single one to save as a list."""
    if key not in _NAMES or given is None:
        return given
    if isinstance(given, list | tuple | set):
        return [str(name) if type(name) is int else name for name in given]
    if not isinstance(given, str):
        raise WrongType(
            f"«{key}={given!r}» of peft= is {type(given).__name__}. Give a list of names: «{key}=['{given}']»."
        )
    return [given] if key == "modules_to_save" else given


def _check_numbers(config: Any) -> None:
    for key, kinds in {"r": int, "lora_alpha": int | float, "lora_dropout": int | float}.items():
        value = getattr(config, key, 1)
        if isinstance(value, bool) or not isinstance(value, kinds):
            form = "a whole number, such as 8" if kinds is int else "a number, such as 0.5"
            raise WrongType(f"«{key}={value!r}» of peft= is {type(value).__name__}. Give {form}.")
        if key != "lora_dropout" and not value > 0:
            raise WrongValue(f"«{key}={value}» of peft= is not positive. Give a number above 0, such as 8.")


def _adaptable(model: nn.Module) -> list[str]:
    """Return the names of the modules that take adapters. ``Conv1D`` is the linear module of transformers."""
    kinds = nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d
    return [name for name, each in model.named_modules() if isinstance(each, kinds) or type(each).__name__ == "Conv1D"]


def _example(model: nn.Module) -> str:
    targets = _adaptable(model) or ["fc"]
    return f"«peft={{'r': 8, 'target_modules': {targets[len(targets) // 2 :][:2]!r}}}»"


def _check_each(key: str, given: Any, wanted: Any, known: Any, fits: Any, what: str, offered: Any = ()) -> None:
    """Raise for something wanted that fits no known name, of which those ``offered`` are meaningful."""
    for each in wanted:
        if not any(fits(name, each) for name in known):
            offered = [*(offered or known)]
            near = difflib.get_close_matches(str(each), offered, 6, 0.3) or offered[-6:]
            there = f"such as {', '.join(map(repr, near))}" if near else "of which there are none: omit it"
            raise WrongValue(f"«{key}={given!r}» of peft=: {each!r} matches nothing. Give {what}, {there}.")


def _check_names(config: Any, model: nn.Module) -> None:
    """Raise for a name of no module, which peft ignores; warn of a rank above both sides of a weight."""
    modules = {name: module for name, module in model.named_modules() if name}
    ends, takers = "names of its modules, or what they end with", _adaptable(model)
    for key in _NAMES:
        given = getattr(config, key, None) or ()
        wanted = () if isinstance(given, str) else sorted(set(given) - _PEFTS_OWN, key=str)
        offered = (
            [name for name, each in modules.items() if [*each.parameters()]] if key == "modules_to_save" else takers
        )
        _check_each(key, [*given], wanted, modules, lambda name, target: matches(name, [target]), ends, offered)
    adapted = [name for name in modules if matches(name, getattr(config, "target_modules", None))] or [*modules]
    for key in ("rank_pattern", "alpha_pattern"):
        given = getattr(config, key, None) or {}
        _check_each(key, given, given, adapted, lambda name, end: re.match(rf"(.*\.)?({end})$", name), ends)
    layers = dict.fromkeys(index for name in adapted for index in re.findall(r"(?<![^.])\d+(?=\.)", name))
    given = getattr(config, "layers_to_transform", None)
    wanted = [given] if isinstance(given, int) else given or ()
    _check_each("layers_to_transform", given, wanted, layers, lambda name, at: name == str(at), "indices of layers")
    rank = config.r if config.peft_type == "LORA" else 0
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1 and matches(name, getattr(config, "target_modules", None)):
            sides = len(weight), weight[0].numel()
            if rank > max(sides):
                warn(
                    f"The adapters' «r={rank}» is more than both sides of {name}, {sides[0]} and {sides[1]}: its adapter has "
                    f"more weights than the module. Give «r={max(1, min(sides) // 2)}» or less."
                )
                return


def with_adapters(model: Any, config: Any) -> nn.Module:
    """Return the model with adapters, its own weights but for a classifier's head frozen, by ``peft.get_peft_model``.

    Args:
        model: a transformers model. The algorithm ``adapters`` of hocket_tools gives them to any other.
        config: as in `read_config`, whose errors it raises.

    Raises:
        ValueError: none of its layers fits, or one computes further with its output; the model is then as it was.
    """
    config = read_config(config, model)
    import peft

    training, required = model.training, {each: each.requires_grad for each in model.parameters()}
    adapted: Any = peft.get_peft_model(model, config)
    try:
        check_targets(adapted)
    except ValueError:
        adapted.unload()
        for parameter, value in required.items():
            parameter.requires_grad_(value)
        raise
    made: nn.Module = adapted.train(training)
    return made


#: Settings without a meaning for weights that are loaded.
_NOT_COMPARED = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}


class AdapterSettings(Component):
    """The configurations of a model's adapters. Nothing is loaded; a resumed run warns of differences.

    Args:
        configurations: of peft, by the name of the adapter.
    """

    path = "hocket-nlp-adapters"

    def __init__(self, configurations: Mapping[str, Any]) -> None:
        self._configurations = configurations

    def state_dict(self, gather: bool) -> dict[str, dict[str, str]]:
        """Return the settings of each adapter as text."""
        return {
            adapter: {
                name: repr(sorted(value) if isinstance(value, set) else json_like(value))
                for name, value in config.to_dict().items()
                if name not in _NOT_COMPARED and not name.startswith("init_")
            }
            for adapter, config in self._configurations.items()
        }

    def check(self, saved: dict[str, dict[str, str]], checkpoint: Saved) -> Check:
        """Warn of every difference that is known on both sides."""
        found = [
            f"{name} of the adapter '{adapter}' was {saved[adapter][name]}, is {value}"
            for adapter, settings in self.state_dict(gather=False).items()
            for name, value in settings.items()
            if saved.get(adapter, {}).get(name, value) != value
        ]
        message = (
            f"The adapters are configured differently from the checkpoint's: {'; '.join(found)}. To continue as before, give "
            "the same peft= as then."
        )
        return Check(warnings=[message] if found else [])

    def absent(self, checkpoint: Saved) -> Check:
        """Accept older checkpoints, which do not have them."""
        return Check()

    def load_state_dict(self, saved: Any) -> None:
        """Do nothing."""


def check_targets(model: nn.Module) -> None:
    """Raise ValueError for adapters on projections that compute further with their output, such as those of QK norm.

    An adapter adds to the result, and once it is merged into the weight, to what the result is computed from.
    """
    kinds = {
        name: type(module.base_layer)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), Finisher)
    }
    if kinds:
        name, kind = next(iter(kinds.items()))
        targets = ", ".join(sorted({each.rpartition(".")[2] for each in kinds}))
        raise WrongValue(
            f"The model has {kind.__name__} at {name}, which normalises or gates its output, and an adapter there would "
            f"compute something else once it is merged into the weights. Choose target_modules without {targets}, such as "
            "['v_proj', 'o_proj'] for Llama or ['c_proj'] for GPT-2."
        )
