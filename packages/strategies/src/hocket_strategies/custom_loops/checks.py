"""What was given to a `hocket.Runtime` instead of models, optimizers and values, and what to write."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hocket.basics.short_repr import short
from hocket.errors import WrongType, WrongValue
from hocket.hookspecs import Event
from hocket.hookspecs.actions import Actions
from hocket.run.resolving import Parts

#: The operations of ``all_reduce``, each with the names that it has elsewhere.
OPERATIONS = {"mean": "avg average", "sum": "add summ reduce total", "min": "minimum", "max": "maximum"}


def check_optimizers(given: Any) -> None:
    """Raise TypeError unless all of these are optimizers, or one is."""
    if isinstance(given, torch.optim.Optimizer):
        raise WrongType(
            f"prepare was given {type(given).__name__}; it takes a module and a sequence of torch.optim.Optimizer. "
            "Write model, optimizer = runtime.setup(model, optimizer)."
        )
    for each in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(each, torch.optim.Optimizer):
            what, write = _other(each)
            raise WrongType(
                f"setup was given {what}. It takes models (torch.nn.Module) and their optimizers (torch.optim.Optimizer). "
                f"Write {write}."
            )


def _other(each: Any) -> tuple[str, str]:
    kind = type(each).__name__
    both = "model, optimizer = runtime.setup(model, optimizer)"
    if isinstance(each, str) or (isinstance(each, type) and issubclass(each, torch.optim.Optimizer)):
        name = each.partition("(")[0] if isinstance(each, str) else each.__name__
        near = difflib.get_close_matches(name.casefold(), {each.casefold(): each for each in dir(torch.optim)}, 1, 0.8)
        made = next((each for each in dir(torch.optim) if near and each.casefold() == near[0]), "AdamW")
        return short(each), f"optimizer = torch.optim.{made}(model.parameters(), lr=1e-3), and then {both}"
    if isinstance(each, LRScheduler):
        return f"a schedule ({kind})", f"{both}, and schedule.step() after runtime.step(optimizer): it needs no set-up"
    if isinstance(each, Iterable) and not isinstance(each, type):
        return f"data ({kind})", "data = runtime.setup_data(loader), and for evaluation train=False"
    return short(each), f"{both}, and data = runtime.setup_data(loader)"


def check_optimizer(given: Any, call: str) -> None:
    """Raise TypeError unless it is an optimizer. ``call`` is what to write."""
    if not isinstance(given, torch.optim.Optimizer):
        what = "a loss" if isinstance(given, torch.Tensor) and given.grad_fn is not None else "a model"
        what = f" ({what})" if isinstance(given, torch.Tensor | nn.Module) else ""
        raise WrongType(
            f"{call.partition('(')[0]} was given {short(given)}{what} as its optimizer. It takes an optimizer "
            f"that setup returned. Write runtime.{call}{', after runtime.backward(loss)' if 'loss' in what else ''}."
        )


def check_operation(op: Any) -> None:
    """Raise ValueError unless ``all_reduce`` has this operation."""
    if not (isinstance(op, str) and op in OPERATIONS):
        name = str(op).rpartition(".")[2].casefold()  # torch.distributed.ReduceOp.SUM too
        ours = next((each for each, others in OPERATIONS.items() if name in (each, *others.split())), "mean")
        raise WrongValue(
            f"all_reduce has no op={op!r}; use one of {', '.join(map(repr, OPERATIONS))}. Write "
            f"runtime.all_reduce(tensor, {ours!r})."
        )


def refuse_model(given: Any) -> NoReturn:
    """Raise TypeError for what was given to ``accumulate`` instead of a model."""
    if isinstance(given, int):
        each = (
            f"last = number % {max(given, 2)} == {max(given, 2) - 1}, and with runtime.accumulate(model, last=last): …"
        )
    else:
        each = "model = runtime.setup(model), and with runtime.accumulate(model, last=number % 4 == 3): …"
    raise WrongType(
        f"accumulate was given {short(given)}. It takes a model that setup returned, and whether this is the last "
        f"microbatch before a step. Write {each}."
    )


def check_folder(path: Any, method: str) -> None:
    """Raise TypeError unless it is the path of a checkpoint."""
    if not isinstance(path, str | os.PathLike):
        raise WrongType(
            f"{method} was given path={short(path)}. It takes the path of a folder, and what it holds by name. Write "
            f"runtime.{method}('runs/a', model=model, optimizer=optimizer)."
        )


def check_loaded(path: Any, things: Mapping[str, Any]) -> None:
    """Raise TypeError for values to load, which cannot be changed in place."""
    for name, thing in things.items():
        if not hasattr(thing, "load_state_dict"):
            raise WrongType(
                f"load was given {name}={short(thing)}, which has no load_state_dict. It takes objects to load into, "
                f"and returns other values. Write rest = runtime.load({str(path)!r}, model=model), and {name} = rest[{name!r}]."
            )


def check_own_loop(parts: Parts) -> None:
    """Raise ValueError if the strategy or the precision acts on events that only the Trainer's loop has."""
    hooks = [*(event.value for event in Event), *(name for name in vars(Actions) if not name.startswith("_"))]
    for argument, part in (("strategy", parts.strategy), ("precision", parts.precision)):
        # A custom loop splits its batches itself.
        used = [name for name in hooks if hasattr(type(part), name) and name != "split_batch"]
        if used and not getattr(part, "own_loop", False):
            raise WrongValue(
                f"{argument} {type(part).__name__} acts on {', '.join(used)}, which only the Trainer's loop has. Train with "
                f"hocket.Trainer, or give hocket.Runtime another {argument}, such as "
                f"{'auto' if argument == 'strategy' else 'bf16'}."
            )


class Prepared(tuple[Any, ...]):
    """What `Runtime.setup` returns for several arguments: errors say that it has to be unpacked."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError."""
        raise WrongType(self._unpacked("called"))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._unpacked(f"asked for {name!r}"), name=name, obj=self)

    def _unpacked(self, done: str) -> str:
        names = ["model" if isinstance(each, nn.Module) else "optimizer" for each in self]
        return (
            f"What setup returned was {done}; it is a tuple ({', '.join(names)}), one for each argument. Write "
            f"{', '.join(names)} = runtime.setup({', '.join(names)})."
        )
