"""Layer freezing: stop training the first layers, one after another, as training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.basics.plugin_errors import PlanError
from hocket.basics.time import Time, Unit
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.hookspecs.needs import Need
from hocket.optim.closures import needs_closure
from hocket.surgery import NoEffectWarning

if TYPE_CHECKING:
    from hocket.state.state import State


def freeze_layers(
    model: nn.Module, fraction: float, layers: Sequence[str] | None = None
) -> tuple[nn.Module, list[str]]:
    """Set ``requires_grad=False`` in the first ``fraction`` of a model's layers; the last layer is never frozen.

    A layer is a module with parameters of its own; layers are in the order of registration. Parameters that a later layer
    shares stay trainable. The parameters may remain in their optimizers: torch's skip those without gradients, with their
    weight decay and momentum, so call ``optimizer.zero_grad()``, which sets gradients to None, before the next step.

    The same call again changes nothing, and a larger fraction freezes the layers that follow. Nothing is made trainable again.

    Source: Raghu et al. 2017, "SVCCA", section 4 (arXiv 1706.05806).

    Args:
        model: changed in place.
        fraction: of all layers but the last, in [0, 1].
        layers: the names of the layers to count; None for all layers, including frozen ones.

    Returns:
        The model, and the names of the layers in this fraction.

    Raises:
        ValueError: ``fraction`` is outside [0, 1].

    Example:
        >>> import torch
        >>> from hocket_general.functional import freeze_layers
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> model, frozen = freeze_layers(model, 0.5)
        >>> frozen
        ['0']
        >>> freeze_layers(model, 0.5)[1], freeze_layers(model, 1.0)[1]
        (['0'], ['0', '2'])
    """
    if not 0 <= fraction <= 1:
        raise WrongValue(f"fraction is {fraction}, but it is a fraction of the layers: give a number in [0, 1].")
    names = trained_layers(model, frozen=True) if layers is None else list(layers)
    frozen = names[: int(fraction * max(len(names) - 1, 0) + 1e-9)]
    if not frozen:
        return model, []
    by_name = dict(model.named_modules())
    first = {by_name[name] for name in frozen}
    kept = {id(p) for module in by_name.values() if module not in first for p in module.parameters(recurse=False)}
    for module in first:
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in kept and parameter.requires_grad:
                parameter.requires_grad_(False)
    return model, frozen


def trained_layers(model: nn.Module, frozen: bool = False) -> list[str]:
    """Return the names of the modules with trainable, or also frozen, parameters of their own, in the order of registration."""
    return [
        name
        for name, module in model.named_modules()
        if any(frozen or parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def _trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


class LayerFreezing(Algorithm):
    """Freeze the first layers of the model, one after another, to save the time of their gradients.

    Sources: Raghu et al. 2017, "SVCCA", section 4, "freeze training" (arXiv 1706.05806); Brock et al. 2017, "FreezeOut"
    (arXiv 1706.04983). From ``start`` on the frozen fraction of the layers grows linearly, to ``level`` at the end of the
    duration. The last layer is never frozen. Frozen parameters require no gradient, and optimizers skip them, but keep them
    and their state; so checkpoints keep their format, and a resumed run continues exactly. At the end of a fit they are
    trainable again, and the next fit freezes them anew.

    Args:
        start: when the first layer may freeze, as a fraction of the duration in [0, 1), such as ``"0.5dur"``.
        level: the fraction of all layers but the last that is frozen at the end, in (0, 1].

    Raises:
        ValueError: an argument is out of its range; later, for an optimizer that moves parameters without gradients (LBFGS).
        PlanError: later, for a task with ``train_batch``.

    Example:
        >>> import hocket, hocket_general, torch
        >>> layers = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Sequential(*layers), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10, device="cpu",
        ...     algorithms=[hocket_general.LayerFreezing(start="0.2dur")],
        ... )
        >>> result = trainer.fit()
    """

    events = {Event.BEFORE_LOAD, Event.FIT_START, Event.BATCH_START, Event.FIT_END, Event.EXCEPTION}
    phase = Phase.MODEL
    needs = Need.SEVERAL_STEPS  # steps in which some parameters have no gradients

    def __init__(self, start: str | Time = "0.5dur", level: float = 1.0) -> None:
        self.start = Time.parse(start)
        if self.start.unit is not Unit.DURATION or not 0 <= self.start.value < 1:
            raise WrongValue(
                f"LayerFreezing was given «start='{start}'», but layers freeze over the rest of the duration: give a fraction "
                "of it in [0, 1), such as '0.5dur'."
            )
        if not 0 < level <= 1:
            raise WrongValue(
                f"LayerFreezing was given «level={level}», but it is the fraction of the layers that is frozen at the end: "
                "give a number in (0, 1]."
            )
        self.level = level
        #: The layers with trainable parameters as the first fit began; None before.
        self._layers: list[str] | None = None
        #: The names of the parameters that were trainable before a checkpoint was loaded, or as the fit began.
        self._trainable: set[str] = set()

    def apply(self, event: Event, state: State) -> None:
        """Freeze the layers that are due."""
        if event is Event.BEFORE_LOAD:
            self._check(state)
            self._trainable = _trainable(state.model)
        elif event is Event.FIT_START:
            if self._layers is None:
                self._layers = trained_layers(state.model)
            self._trainable = self._trainable or _trainable(state.model)
            if self.level * (len(self._layers) - 1) < 1:
                warn(
                    f"layer-freezing freezes no layer: «level={self.level}» of the {len(self._layers)} trained layers of "
                    f"{type(state.model).__name__}, without the last one, is less than one layer. Raise level, or remove it.",
                    NoEffectWarning,
                )
        elif event is Event.BATCH_START:
            due = self.level * max(state.elapsed() - self.start.value, 0.0) / (1 - self.start.value)
            _, frozen = freeze_layers(state.model, min(due, 1.0), self._layers)
            state.log({"layer-freezing/layers": len(frozen)})
        else:
            self._thaw(state.model)
            self._trainable = set()

    def no_effect(self, state: State) -> str:
        """Return that the first layer would have been frozen only after the last batch, if so."""
        last = max(state.elapsed(), 1.0) * (1 - 1 / max(state.timestamp.batch, 1))
        layers = max(len(self._layers or ()) - 1, 0)
        due = self.level * max(last - self.start.value, 0.0) / (1 - self.start.value)
        if self.level * layers < 1 or int(min(due, 1.0) * layers + 1e-9):  # a fit itself warns of a low level
            return ""
        return (
            f"from «start='{self.start}'» on, the {state.timestamp.batch} batches are over before the first layer freezes. "
            "Give an earlier start=, such as '0.2dur', train longer, or remove it if the model has few layers."
        )

    def _thaw(self, model: nn.Module) -> None:
        """Make parameters trainable again that this algorithm may have frozen: a second Trainer would not train them."""
        trainable = {id(parameter) for name, parameter in model.named_parameters() if name in self._trainable}
        for layer in (self._layers or [])[:-1]:
            for parameter in model.get_submodule(layer).parameters(recurse=False):
                if id(parameter) in trainable and not parameter.requires_grad:
                    parameter.requires_grad_(True)

    def _check(self, state: State) -> None:
        if state.task.owns_steps:
            raise PlanError(
                f"layer-freezing freezes all layers but the last, and {type(state.task).__name__} may train several models in "
                "its train_batch. Call hocket_general.functional.freeze_layers(part, fraction) there for each part."
            )
        for optimizer in state.optimizers:
            if needs_closure(optimizer):
                raise WrongValue(
                    f"LayerFreezing relies on optimizers that skip parameters without gradients, and "
                    f"{type(optimizer).__name__} does not. Remove layer-freezing, or choose an optimizer such as SGD or AdamW."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the layers that freeze in turn, or None before the first fit."""
        return {"layers": self._layers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them. Which parameters are frozen is saved with the model."""
        if state_dict.keys() != {"layers"}:
            raise WrongValue(f"LayerFreezing's state has the key 'layers', but was given {sorted(state_dict)}")
        self._layers = state_dict["layers"]
