"""The algorithm `finetuning`: freeze and unfreeze parts of a model by schedule, with learning rates by stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn

from hocket.basics.plugin_errors import PlanError, PluginConfigError
from hocket.basics.time import Unit
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.hookspecs.needs import Need
from hocket.optim.closures import needs_closure
from hocket.optim.groups import check_pattern, named_parameters
from hocket.state.span import Span
from hocket.state.state import State
from hocket.state.task import Task
from hocket.surgery import NoEffectWarning
from hocket_tools.arguments import checked
from hocket_tools.finetuning.norms import norms_of, said
from hocket_tools.finetuning.rates import StageRates
from hocket_tools.finetuning.stages import read_stages, trains
from hocket_tools.progress import say


class Finetuning(Algorithm):
    """Train parts of a model in stages: gradual unfreezing, with a learning rate for each part.

    Sources: Howard and Ruder 2018, "Universal Language Model Fine-tuning for Text Classification" (arXiv 1801.06146), section
    3.2, discriminative fine-tuning, and 3.3, gradual unfreezing.

    Parameters that are frozen require no gradient, and optimizers skip them: no update, weight decay or momentum. They stay in
    the optimizer with their state, which continues once they train again; one that trains for the first time begins with a
    fresh state. When the fit is over, what it froze is trainable again.

    Args:
        stages: a list of ``{"at": time, "train": globs, "freeze": globs, "lr": rate, "lr_factor": factor}`` in the order of
            their times; the first begins at zero, and with ``train`` nothing else trains. Globs are for names of parameters
            (``"layer4.*"``; ``"1d"``: biases and norms); the last stage that matches a parameter decides. The parameters of
            ``train`` get the learning rate ``lr``, or ``lr_factor`` times that of the optimizer, from then on; without either
            they keep theirs. A schedule multiplies the rate.
        batch_norm: ``"eval"``: norms with running statistics whose parameters are frozen are in eval mode, and keep their
            statistics; ``"train"``: they normalize by the batch, and update them.

    Raises:
        PluginConfigError: an argument has another form; later, a glob matches no parameter, or a stage trains none.
        PlanError: later, it trains a parameter that none of several optimizers holds. A single one gets them.
        ValueError: later, for an optimizer that moves parameters without gradients (LBFGS).

    Example:
        >>> import hocket, torch
        >>> from hocket_tools import Finetuning
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> slowly = Finetuning(
        ...     stages=[{"at": "0ep", "train": "2.*", "lr": 0.1}, {"at": "1ep", "train": "*", "lr_factor": 0.1}]
        ... )
        >>> trainer = hocket.Trainer(
        ...     model=model, loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="2ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 5, algorithms=[slowly],
        ... )
        >>> result = trainer.fit()
    """

    events = {Event.BEFORE_LOAD, Event.FIT_START, Event.BATCH_START, Event.AFTER_FIT, Event.EXCEPTION}
    phase = Phase.MODEL
    conflicts = ("layer-freezing",)
    once = "The second would undo what the first freezes. Put the stages of both into one list, in the order of their times."
    needs = Need.SEVERAL_STEPS  # steps in which some parameters have no gradients

    @checked
    def __init__(self, stages: Sequence[Mapping[str, Any]], batch_norm: Literal["eval", "train"] = "eval") -> None:
        self.stages = read_stages(stages)
        self.batch_norm = batch_norm
        self._rates: StageRates | None = None
        #: The numbers of the stages that have begun, as applied; None before the first batch of a fit.
        self._begun: list[int] | None = None
        #: The names of the parameters frozen, and of the norms put in eval mode, by this algorithm.
        self._frozen: set[str] = set()
        self._still: set[str] = set()
        #: The number of elements of the parameters that train.
        self._size = 0

    def apply(self, event: Event, state: State) -> None:
        """Begin the stages that are due."""
        if event is Event.BEFORE_LOAD:
            self._check(state)
            named = {key: names for key, names, _ in _parameters(state.task)}
            self._rates = StageRates(state.optimizers, self.stages, named)
        elif event is Event.FIT_START:
            self._begun = None
            self._check_times(state)
        elif event is Event.BATCH_START:
            begun = [number for number, stage in enumerate(self.stages) if stage.begun(state)]
            if begun != self._begun:
                self._begin(state, begun)
            state.log({"finetuning/stage": begun[-1], "finetuning/parameters": self._size})
        else:
            self._restore(state)

    def _begin(self, state: State, begun: list[int]) -> None:
        """Freeze, unfreeze and set learning rates as of these stages. The same call again changes nothing."""
        self._begun = begun
        self._size = total = 0
        for _, names, parameter in _parameters(state.task):
            trained = self._trains(names, parameter, begun)
            total += parameter.numel()
            self._size += parameter.numel() if trained else 0
            if trained is not parameter.requires_grad:
                parameter.requires_grad_(trained)
                (self._frozen.difference_update if trained else self._frozen.update)(names)
            if not trained:
                parameter.grad = None
        norms = self._norms(state, begun)
        assert self._rates is not None, "before_load comes first"
        self._rates.set(state, begun)
        self._say(begun[-1], total, norms, state.strategy.rank)

    def _norms(self, state: State, begun: Sequence[int]) -> int:
        """Put norms of frozen parts in eval mode, and those that train again back. Return the number of frozen norms."""
        frozen = 0
        for name, module in norms_of(state.model):
            own = list(module.parameters(recurse=False))
            statistics = self._trains([f"{name}.running_mean".lstrip(".")], module.running_mean, begun)
            trained = any(parameter.requires_grad for parameter in own) if own else statistics
            frozen += not trained
            if trained and name in self._still:
                module.training = True
                self._still.discard(name)
            elif not trained and module.training and self.batch_norm == "eval":
                module.training = False
                self._still.add(name)
        return frozen

    def _trains(self, names: Sequence[str], tensor: Tensor, begun: Sequence[int]) -> bool:
        return trains([self.stages[number] for number in begun], names, tensor, not self.stages[0].train)

    def _say(self, number: int, total: int, norms: int, rank: int) -> None:
        say(
            f"finetuning, stage {number + 1} of {len(self.stages)} (from {self.stages[number].at}): {self._size:,} of "
            f"{total:,} parameters train{said(norms, self.batch_norm)}.",
            rank,
        )

    def _restore(self, state: State) -> None:
        """Make trainable again what this algorithm froze: a second Trainer would not train it."""
        for _, names, parameter in _parameters(state.task):
            if not self._frozen.isdisjoint(names):
                parameter.requires_grad_(True)
        for name, module in norms_of(state.model):
            if name in self._still:
                module.training = True
        self._frozen, self._still, self._begun = set(), set(), None

    def _check_times(self, state: State) -> None:
        """Warn of stages that never begin. Raises PluginConfigError if epochs and batches are not in their order."""
        length = state.epoch_length
        batches = {Unit.BATCH: 1, Unit.EPOCH: length} if length else {}
        for before, stage in pairwise((self.stages[0], *self.stages)):
            if stage.at.value * batches.get(stage.at.unit, math.inf) < before.at.value * batches.get(before.at.unit, 0):
                raise PluginConfigError(
                    f"The stage at {stage.at} would begin before the one at {before.at}, after which it is given: an epoch has "
                    f"{length} batches. Give stages in the order of their times."
                )
            if Span(stage.at).opens(state) is False:
                late = f"the stage at {stage.at} never begins, because training ends after {state.max_duration}"
                warn(f"finetuning: {late}. Give an earlier «at», or a longer duration.", NoEffectWarning)

    def _check(self, state: State) -> None:
        for optimizer in state.optimizers:
            if needs_closure(optimizer):
                raise WrongValue(
                    f"finetuning relies on optimizers that skip parameters without gradients, and {type(optimizer).__name__} "
                    "does not. Remove finetuning, or choose an optimizer such as SGD or AdamW."
                )
        parameters = list(_parameters(state.task))
        by_name = {name: parameter for _, names, parameter in parameters for name in names}
        before, trained_once = set[int](), set[int]()
        for number, stage in enumerate(self.stages):
            for option, patterns in (("train", stage.train), ("freeze", stage.freeze)):
                for pattern in patterns:
                    check_pattern(pattern, by_name, option)
            trained = {key for key, names, each in parameters if self._trains(names, each, range(number + 1))}
            if not trained:
                raise PluginConfigError(f"From {stage.at} on finetuning trains nothing: add 'train' to that stage.")
            if trained == before and not stage.has_rate:
                warn(
                    f"finetuning: the stage at {stage.at} changes nothing. Remove it, or give it «lr».", NoEffectWarning
                )
            before, trained_once = trained, trained_once | trained
        self._check_adapters(state.model, trained_once)
        self._hold(state, [(names[0], each) for key, names, each in parameters if key in trained_once])

    def _check_adapters(self, model: nn.Module, trained: Set[int]) -> None:
        """Raise PluginConfigError if adapters of peft never train, and warn if the weights that they froze do."""
        adapted: dict[str, Any] = {name: each for name, each in model.named_modules() if hasattr(each, "base_layer")}
        own = {id(each) for layer in adapted.values() for each in layer.parameters() if each.requires_grad}
        frozen = [
            name for name, each in adapted.items() if not trained.isdisjoint(map(id, each.base_layer.parameters()))
        ]
        if own and trained.isdisjoint(own):
            raise PluginConfigError(
                f"finetuning freezes all adapters, such as those of {next(iter(adapted))}, so that they never change. Add "
                "their names to 'train' of a stage, such as «['fc.*', '*.lora_*']», or remove the adapters."
            )
        if frozen:
            warn(
                f"finetuning trains the weights of {', '.join(frozen[:3])} too, which adapters had frozen. To train adapters "
                "alone, name only them in 'train', such as «['*.lora_*']»."
            )

    def _hold(self, state: State, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Add the parameters to the optimizer that it was not given, as when it was given the parameters that train first."""
        optimizers = state.optimizers
        held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        lost = [(name, parameter) for name, parameter in trained if id(parameter) not in held]
        if len(optimizers) > 1 and lost:
            raise PlanError(
                f"finetuning trains {lost[0][0]}{f' and {len(lost) - 1} more' if lost[1:] else ''}, which none of the "
                f"{len(optimizers)} optimizers holds, so that it would never be updated. Give it to one of them: they skip "
                "parameters that are frozen."
            )
        if optimizers and lost:
            optimizers[0].add_param_group({"params": [parameter for _, parameter in lost]})

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the parameters that it froze, and of the norms that it put in eval mode."""
        return {"frozen": sorted(self._frozen), "eval": sorted(self._still)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them. Flags and modes are saved with the model, learning rates with the optimizer."""
        if state_dict.keys() != {"frozen", "eval"}:
            raise WrongValue(f"Finetuning's state has the keys 'frozen' and 'eval', but was given {sorted(state_dict)}")
        self._frozen, self._still = set(state_dict["frozen"]), set(state_dict["eval"])


def _parameters(task: Task) -> Iterator[tuple[int, list[str], nn.Parameter]]:
    """Yield the id, all names and the tensor of each parameter; shared ones have several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in task.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in named_parameters(task):
        yield id(parameter), names.get(id(parameter), [name]), parameter
