"""Create, check, and after surgery repair, the optimizers given to the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.basics import fast_paths
from hocket.basics.short_repr import short
from hocket.errors import WrongType, WrongValue
from hocket.help import optional_packages, warn
from hocket.optim.closures import gets_closure
from hocket.optim.groups import OPTIONS, make_groups, scale_rates
from hocket.plugins import registry
from hocket.plugins.building import build, read
from hocket.state.task import Task

if TYPE_CHECKING:
    from hocket.surgery import Replacement


def make_optimizers(given: Any, task: Task, replacements: Sequence[Replacement]) -> dict[str, Optimizer]:
    """Return the optimizers of a run by name; optimizers without a name are numbered.

    Args:
        given: an Optimizer; a function of the list of parameters that returns one; a name or configuration such as
            ``"adamw(lr=1e-3)"``, with parameter groups as in `hocket.optim.groups.make_groups`; a sequence of those; a dict of
            those by name, in which all but instances get the parameters of the task's (or its model's) submodule of that name;
            or None to call ``task.configure_optimizers()``.
        task: the task after surgery; optimizers may hold only its parameters.
        replacements: the modules that surgery replaced; instances are repaired by them.

    Raises:
        TypeError: ``given`` is none of these. ValueError: an optimizer holds no parameters, parameters that the
            model does not have, or, unless the task has `train_batch`, one that another holds. RuntimeError: an instance
            has state and surgery was done.
    """
    if given is None:
        given = task.configure_optimizers()
        optional_packages.ask("failures.optimizers.check_configured", given)
    elif type(task).configure_optimizers is not Task.configure_optimizers:
        warn(
            f"«optimizer=» is used, and configure_optimizers() of {type(task).__name__} is not called. Omit one of them."
        )
    if given is None:
        return {}
    if isinstance(given, Mapping) and (modules := _named(given, task)):
        optimizers = {name: _make(item, modules[name], replacements) for name, item in given.items()}
    else:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        listed = [_make(item, task, replacements) for item in (given if several else [given])]
        optimizers = {str(number): optimizer for number, optimizer in enumerate(listed)}
    _check(list(optimizers.values()), task)
    return optimizers


def _named(given: Mapping[Any, Any], task: Task) -> dict[str, nn.Module]:
    """Return each optimizer's module by name; empty if the dict is not optimizers by name but one plug-in's configuration.

    Raises ValueError if only some of the names are submodules.
    """
    if not given:
        return {}
    modules: dict[str, nn.Module] = {}
    for name, item in given.items():
        part: nn.Module | None = task
        if not isinstance(item, Optimizer):
            inside = [getattr(module, name, None) for module in (task, task.model) if isinstance(name, str)]
            part = next((module for module in inside if isinstance(module, nn.Module)), None)
        if part is not None:
            modules[str(name)] = part
    several = len(given) > 1 or not isinstance(next(iter(given.values())), Mapping | None)
    if (not modules and not several) or (len(modules) == len(given) and all(type(name) is str for name in given)):
        return modules
    missing = next(name for name in given if name not in modules)
    kind = next((key for key in ("type", "name", "_target_", "class_path") if isinstance(given.get(key), str)), None)
    if kind is not None:
        chosen = str(given[kind]).rpartition(".")[2].lower()
        config = {key: value for key, value in given.items() if key != kind}
        raise WrongValue(
            f"«optimizer={dict(given)!r}» has the key {kind!r}, and should have one key, the name of an optimizer, or those of "
            f"submodules. Write «optimizer={ {chosen: config}!r}»."
        )
    raise WrongValue(
        f"«optimizer={{{missing!r}: …}}» names no submodule of {type(task.model).__name__}, which has "
        f"{', '.join(name for name, _ in task.model.named_children()) or 'none'}. An optimizer that is given by name and not "
        "as an instance gets the parameters of that submodule."
    )


def step(optimizer: Optimizer, closure: Callable[[], Any]) -> None:
    """Call ``optimizer.step()``, with the closure for optimizers that may call it."""
    if gets_closure(optimizer):
        optimizer.step(closure)
    else:
        fast_paths.step(optimizer)


def has_modes(optimizer: Optimizer) -> bool:
    """Whether an optimizer has the methods ``train()`` and ``eval()``, which put other weights into the model."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def _make(given: object, part: nn.Module, replacements: Sequence[Replacement]) -> Optimizer:
    if isinstance(given, Optimizer):
        if replacements:
            from hocket.surgery import update_optimizer

            update_optimizer(given, replacements)
        return given
    parameters = list(part.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        model = part.model if isinstance(part, Task) else part
        raise WrongValue(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is nothing to optimize. "
            "Omit «optimizer=» to evaluate or predict only, or set requires_grad on the parameters to train."
        )
    if isinstance(given, str | Mapping):
        optimizer = _from_name(given, part, replacements)
    elif callable(given):
        try:
            optimizer = given(parameters)
        except (TypeError, AttributeError) as error:
            error.add_note(
                "optimizer= is called with the list of parameters. Write optimizer=lambda parameters: "
                "torch.optim.AdamW(parameters, lr=1e-3), or 'adamw(lr=1e-3)'."
            )
            raise
    else:
        optimizer = given
    if not isinstance(optimizer, Optimizer):
        raise WrongType(
            f"«optimizer={short(given)}» gave {type(optimizer).__name__}, not a torch.optim.Optimizer. Pass a function of the "
            "parameters, such as «lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)¦`{torch.optim:AdamW: {lr: "
            "0.001}}`», an optimizer, or a name such as 'adamw(lr=1e-3)'."
        )
    return optimizer


def _from_name(given: str | Mapping[Any, Any], part: nn.Module, replacements: Sequence[Replacement]) -> Any:
    """Build the plug-in, with parameter groups if the configuration asks for them or the plug-in has a rule for them.

    A plug-in with a function ``routes(module)``, which returns options by the names of parameters, gets these options. If a
    plug-in replaced the model as a whole, names of its parameters mean nothing any more, and a warning says so.
    """
    name, config = read("optimizers", given)
    plugin = registry.find("optimizers", name).load()
    own = {key: config.pop(key) for key in OPTIONS if key in config}
    if own and (whole := next((replacement for replacement in replacements if not replacement.name), None)):
        warn(
            f"«optimizer={name!r}»: ignored {' and '.join(own)}, which is about the parameters of "
            f"{type(whole.old).__name__}, but {type(whole.new).__name__} replaces it."
        )
        own = {}
    routes = getattr(plugin, "routes", None)
    if not own and routes is None:
        return build("optimizers", {name: config}, list(part.parameters())).obj
    module = part.model if isinstance(part, Task) else part
    groups = make_groups(part, **own, routes=routes and routes(module))
    optimizer = build("optimizers", {name: config}, groups).obj
    if isinstance(optimizer, Optimizer):
        scale_rates(optimizer)
    return optimizer


def _check(optimizers: Sequence[Optimizer], task: Task) -> None:
    known = set(task.parameters())
    held: set[torch.Tensor] = set()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        give = f"give a function: «optimizer=lambda parameters: torch.optim.{name}(parameters, …)»"
        parameters = check_parameters(optimizer, known, type(task.model).__name__, give)
        if held & parameters and not task.shares_parameters:
            raise WrongValue(
                f"{name} holds parameters that another optimizer holds; each would be stepped twice a batch. Give each "
                "parameter to one optimizer, or define train_batch in a hocket.Task, whose steps may share parameters."
            )
        held |= parameters


def check_parameters(
    optimizer: Optimizer, known: Collection[torch.Tensor], model: str, write: str
) -> set[torch.Tensor]:
    """Return the parameters of an optimizer. Raises ValueError if there are none, or some that are not in the model.

    Args:
        known: the model's parameters.
        model: the name of the model, for the message.
        write: what to write instead, for the message.
    """
    name = type(optimizer).__name__
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not parameters:
        raise WrongValue(f"{name} holds no parameters. Give it the model's: torch.optim.{name}(model.parameters()).")
    if foreign := parameters.difference(known):
        raise WrongValue(
            f"{name} holds {len(foreign)} of {len(parameters)} parameters that are not in the model, so stepping it "
            f"would not train {model}. Make it from this model's parameters, or {write}."
        )
    return parameters
