"""Adapters of peft, such as LoRA, in linear and convolutional modules of any model, and their merging into the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from hocket.errors import Unsupported, WrongValue
from hocket.help import optional_packages
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.component import Component
from hocket.state.state import State
from hocket.surgery import Replacement
from hocket_tools.arguments import checked
from hocket_tools.compression.libraries import imported
from hocket_tools.finetuning.norms import norms_of, said
from hocket_tools.progress import say


class Adapters(Algorithm):
    """Train low-rank adapters of a model's linear and convolutional modules, and freeze its own weights.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685), section 4.1; the
    modules are those of `peft`. They are put in place of the model's modules as a Trainer is made, before its optimizer;
    names of weights get ``base_layer``. `merge_adapters` merges them afterwards. Models of transformers have ``peft=`` of
    `hocket_nlp.HuggingFaceTask`.

    Args:
        peft: arguments of ``peft.LoraConfig``, or a configuration of peft: ``target_modules`` are names of modules, or what
            they end with (``["conv2", "fc"]``), or a regular expression for full names; ``modules_to_save`` are those to
            train as they are, such as a new head.
        batch_norm: ``"eval"``: frozen norms with running statistics are in eval mode; ``"train"``: they update them.

    Raises:
        PluginConfigError: ``batch_norm`` is neither. As a Trainer is made also:
        ImportError: peft or hocket-algorithms-nlp, which reads its configurations, is not installed.
        TypeError: ``peft`` is no configuration. ValueError: no module has one of the names, or fits; ``r`` or ``lora_alpha``
            is not positive; or the model has adapters.

    Example:
        >>> import hocket, torch
        >>> from hocket_tools import Adapters, merge_adapters
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2))
        >>> trainer = hocket.Trainer(
        ...     model=model, loss="cross_entropy", optimizer="adamw(lr=1e-2)", duration="1ep", device="cpu",
        ...     train_data=[(torch.randn(8, 3, 4, 4), torch.zeros(8, dtype=torch.long))],
        ...     algorithms=[Adapters(peft={"r": 2, "target_modules": ["0", "2"]})],
        ... )
        >>> result = trainer.fit()
        >>> merge_adapters(model)[0]
        Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
    """

    events = {Event.INIT, Event.FIT_START}
    phase = Phase.MODEL
    once = "A model has one configuration of adapters. Name the modules of both in target_modules of one."

    @checked
    def __init__(self, peft: Any, batch_norm: Literal["eval", "train"] = "eval") -> None:
        self.peft = peft
        self.batch_norm = batch_norm
        self._frozen_norms: list[str] = []
        #: The configurations of peft, by the name of the adapter.
        self._configurations: dict[str, Any] = {}

    def apply(self, event: Event, state: State) -> None:
        """Insert adapters once; put frozen norms in eval mode at the beginning of every fit."""
        if event is Event.INIT:
            before = dict(state.model.named_modules())
            self._configurations = _inject(state.model, self.peft)
            changed = [(name, before[name], new) for name, new in _adapted(state.model).items()]
            state.replacements += [Replacement(name, old, new, state.model) for name, old, new in changed]
            norms = [(name, list(module.parameters())) for name, module in norms_of(state.model)]
            self._frozen_norms = [name for name, own in norms if not any(each.requires_grad for each in own)]
            self._say(state, len(changed))
        elif not _adapted(state.model):
            raise WrongValue(
                "The adapters were merged into the weights of the model, which are frozen, so nothing can be trained. Merge a "
                "copy, merge_adapters(copy.deepcopy(trainer.state.model)), or make a new Trainer with the merged model."
            )
        if self.batch_norm == "eval":
            for name in self._frozen_norms:
                state.model.get_submodule(name).training = False

    def _say(self, state: State, modules: int) -> None:
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in state.model.parameters()]
        trained, total = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
        state.log({"adapters/modules": modules, "adapters/parameters": trained})
        norms = said(len(self._frozen_norms), self.batch_norm)
        say(f"adapters in {modules} modules: {trained:,} of {total:,} parameters train{norms}.", state.strategy.rank)

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each module that gets an adapter, or is trained as it is."""
        config = _nlp().read_config(self.peft, model)
        wanted = {"gets an adapter": config.target_modules, "is trained": getattr(config, "modules_to_save", None)}
        return [
            f"{name}: {type(module).__name__} {what}"
            for name, module in model.named_modules()
            for what, targets in wanted.items()
            if name and _nlp().matches(name, targets)
        ]

    def checkpoint_components(self, state: State) -> list[Component]:
        """Return the configurations of the adapters, of whose changes a resumed run warns."""
        return [_nlp().AdapterSettings(self._configurations)]


@checked
def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge the adapters of a model into its weights, and return the model without them, which computes the same.

    Args:
        model: changed in place: of `Adapters`, of ``peft.inject_adapter_in_model`` or of ``peft.get_peft_model``, or a module
            that has such a model. Copy it (``copy.deepcopy``) to train further.

    Raises:
        ImportError: peft is not installed.
        ValueError: the model has no adapters, or merged weights would not be finite.
        hocket.errors.Unsupported: an adapter is one of a convolution with groups, which peft does not merge.

    Example:
        >>> import peft, torch
        >>> from hocket_tools import merge_adapters
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0"]), model)
        >>> merge_adapters(adapted)
        Sequential(
          (0): Linear(in_features=4, out_features=2, bias=True)
        )
    """
    adapted = _adapted(model)
    if not adapted:
        raise WrongValue(
            f"{type(model).__name__} has no adapters to merge; perhaps they are merged already. Give the model that was "
            "trained with `Adapters`, or of peft."
        )
    if grouped := _grouped({name: each for name, each in model.named_modules() if hasattr(each, "get_base_layer")}):
        raise Unsupported(
            f"peft does not merge adapters of convolutions with groups: {grouped}. Keep the adapters, in an export by "
            "adapters='apart', or train without those: leave them out of target_modules."
        )
    for name, layer in adapted.items():
        if not name:
            return _merged(layer)
        model.set_submodule(name, _merged(layer))
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model


def _merged(layer: Any) -> nn.Module:
    if hasattr(layer, "merge_and_unload"):  # a model of peft
        merged: nn.Module = layer.merge_and_unload(safe_merge=True)
    elif hasattr(layer, "modules_to_save"):
        merged = layer.modules_to_save[layer.active_adapter]
    elif hasattr(layer, "unload_and_optionally_merge_module"):  # of MultiheadAttention
        merged = layer.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
    else:
        layer.merge(safe_merge=True)
        merged = layer.get_base_layer()
    return merged


def _inject(model: nn.Module, given: Any) -> dict[str, Any]:
    """Insert adapters in place, and return their configurations by name. Raises the errors of `Adapters`."""
    config = _nlp().read_config(given, model)
    import peft

    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        fitting = [
            name for name, each in model.named_modules() if name and isinstance(each, nn.Linear | nn.Conv1d | nn.Conv2d)
        ]
        grouped = _grouped(
            {name: each for name, each in model.named_modules() if _nlp().matches(name, config.target_modules)}
        )
        raise WrongValue(
            f"«peft={given!r}» fits no adapters to {type(model).__name__}: {str(error).rstrip('.')}. "
            f"{f'These have groups: {grouped}. ' if grouped else ''}Its linear and "
            f"convolutional modules are {', '.join(fitting[:12])}{' …' if fitting[12:] else ''}: write for instance "
            f"«peft={{'r': 8, 'target_modules': {fitting[-2:]!r}}}»."
        ) from error
    _nlp().check_targets(model)
    return dict(getattr(model, "peft_config", None) or {"default": config})


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Return the outermost modules of peft in a model, by name. Raises MissingPackage without peft."""
    imported("peft", "peft")
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(f"{name}.".startswith(f"{outer}." if outer else "") for outer in found)
        if isinstance(module, PeftModel | BaseTunerLayer | AuxiliaryTrainingWrapper) and not inside:
            found[name] = module
    return found


def _grouped(layers: Mapping[str, nn.Module]) -> str:
    """Return the names of convolutions with groups, also of those with adapters, and how many they have."""
    groups = {name: getattr(getattr(each, "base_layer", each), "groups", 1) for name, each in layers.items()}
    return ", ".join(f"{name} ({number} groups)" for name, number in groups.items() if number != 1)


def _nlp() -> Any:
    return optional_packages.module("hocket_nlp.adapters", "adapters")
