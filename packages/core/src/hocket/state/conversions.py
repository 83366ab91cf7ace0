"""Objects where names are expected, and names where objects are: arguments whose meaning is plain are converted."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.basics.losses import LOSSES, named_loss
from hocket.basics.short_repr import short
from hocket.errors import WrongType, WrongValue
from hocket.help import names, optional_packages, warn

if TYPE_CHECKING:
    from hocket.basics.types import Metric, PluginLike
    from hocket.checkpoints import Checkpoints

_PRECISIONS = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}
_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def precision(given: PluginLike) -> PluginLike:
    """Convert a torch.dtype to the precision that computes in it, and keeps weights in float32 if it is 16-bit."""
    if not isinstance(given, torch.dtype):
        return given
    name = _PRECISIONS.get(given)
    if name is None:
        raise WrongType(
            f"«precision={given}» is not a precision. Write one of 'fp32', 'bf16', 'fp16', 'fp64', or another of "
            "`hocket plugins list --kind precisions`."
        )
    if name in ("fp16", "bf16"):
        warn(
            f"«precision={given}» is read as «precision='{name}'»: autocast, with weights in float32. Write that, or "
            f"'{name}-true' for weights in {given} too."
        )
    return name


def device(given: PluginLike) -> PluginLike:
    """Convert a torch.device, or text with an index such as ``"cuda:0"``, to the name of its kind."""
    dev = given if isinstance(given, torch.device) else None
    if isinstance(given, str) and re.fullmatch(r"(cpu|cuda|mps|xla):\d+", given):
        dev = torch.device(given)
    if dev is None:
        return given
    if dev.index:
        raise WrongValue(
            f"«device='{dev}'» chooses one of several devices. hocket takes the first that is visible, or one for each process "
            f"with «devices=». Write «device='{dev.type}'», and choose with the environment: CUDA_VISIBLE_DEVICES={dev.index}."
        )
    return dev.type


def loss(given: object) -> Callable[..., Any] | None:
    """Convert the name of a loss in torch, or its class, to a function of (outputs, targets)."""
    if isinstance(given, str):
        if name := named_loss(given):
            wanted = names.plain(given.rpartition(".")[2])
            if wanted.removesuffix("loss") != names.plain(name).removesuffix("loss"):
                warn(f"«loss={given!r}» is read as «loss=torch.nn.functional.{name}».")
            function: Callable[..., Any] = getattr(nn.functional, name)
            return function
        near = names.closest(given, LOSSES)
        raise WrongValue(
            f"«loss={given!r}» is not the name of a loss.{f' Did you mean {near!r}?' if near else ''} Give a function of "
            "(outputs, targets), such as «loss=torch.nn.functional.cross_entropy», or one of these names: "
            f"{', '.join(map(repr, LOSSES))}."
        )
    if isinstance(given, type) and issubclass(given, nn.Module):
        module: nn.Module = _instance(given, "loss")
        return module
    if given is not None and not callable(given):
        raise WrongType(
            f"«loss={short(given)}» is {type(given).__name__}, which cannot be called. Give a function of (outputs, "
            "targets), such as «loss=torch.nn.functional.cross_entropy»; a Task defines several losses as a dict."
        )
    return given


def metrics(given: object, argument: str = "metrics") -> Mapping[str, Metric] | Callable[[], Any] | None:
    """Convert one metric, a class, a name or a list of them to metrics by name; a function that makes them stays."""
    from hocket.state import simple_metrics

    def named(metric: object) -> tuple[str, Any]:
        if isinstance(metric, str):
            name = simple_metrics.find(metric)
            if name is None:
                near = names.closest(metric, simple_metrics.METRICS)
                raise WrongValue(
                    f"«{argument}={metric!r}» is not one of hocket's own metrics: {', '.join(simple_metrics.METRICS)}. "
                    f"{f'Did you mean {near!r}? Write «{argument}=[{near!r}]». ' if near else ''}Others come from "
                    f"torchmetrics, such as «{argument}={{{metric!r}: torchmetrics.classification.MulticlassAccuracy(10)}}¦"
                    f"{argument}={{{metric!r}: {{'torchmetrics.classification:MulticlassAccuracy': {{'num_classes': 10}}}}}}»; "
                    "or write an object with update, compute and reset."
                )
            return name, simple_metrics.METRICS[name]()
        if isinstance(metric, type):
            return metric.__name__, _instance(metric, argument)
        if callable(metric) and not hasattr(metric, "update") and _required(metric) == []:  # a function that makes it
            return named(metric())
        return type(metric).__name__, metric

    if isinstance(given, Mapping):
        return {name: named(metric)[1] for name, metric in given.items()}
    is_one = isinstance(given, str | type) or (hasattr(given, "update") and hasattr(given, "compute"))
    if not is_one and not isinstance(given, Sequence | set):
        if given is not None and (not callable(given) or _required(given)):
            raise WrongType(
                f"«{argument}={short(given)}» is neither metrics nor a function without arguments that makes them. A metric is "
                f"an object with update(outputs, targets), compute() and reset(). Write «{argument}='accuracy'», or "
                f"«{argument}={{'mine': MyMetric()}}¦{argument}={{'mine': 'module:MyMetric'}}»."
            )
        return given
    listed = [named(metric) for metric in (given if isinstance(given, Sequence | set) and not is_one else [given])]
    if len(dict(listed)) < len(listed):
        given_names = ", ".join(name for name, _ in listed)
        raise WrongValue(
            f"«{argument}=» lists {given_names}: some have one name. Name each: «{argument}={{'first': …, 'second': …}}»."
        )
    return dict(listed)


def _required(function: Callable[..., object]) -> list[str] | None:
    """Return the arguments that a function needs; None if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        arg.name
        for arg in parameters
        if arg.default is arg.empty and arg.kind in (arg.POSITIONAL_ONLY, arg.POSITIONAL_OR_KEYWORD)
    ]


def _instance(cls: type, argument: str) -> Any:
    """Return an instance of a class that needs no arguments. Raises TypeError for a class that does."""
    try:
        return cls()
    except (TypeError, ValueError) as error:
        raise WrongType(
            f"«{argument}={cls.__name__}» is a class that needs arguments: {error}. Give an instance: {argument}="
            f"{cls.__name__}(…), with its arguments {_signature(cls)}."
        ) from None


def _signature(cls: type) -> str:
    try:
        return ", ".join(str(parameter).split(":")[0] for parameter in inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return "…"


def checkpoints(given: object, runs: object = "runs") -> Checkpoints | None:
    """Convert a folder, a dict of arguments, or True, for a folder in ``runs``, to Checkpoints."""
    if given is None or given is False:
        return None
    kind: type[Checkpoints] = optional_packages.module("hocket_checkpoints.periodic_saving", "checkpoints=").Checkpoints
    if given is True:
        inside = str(Path(path(runs)) / "checkpoints")
        warn(f"«checkpoints=True» is read as «checkpoints={inside!r}». Write the folder, so that each run has its own.")
        return kind(inside)
    if isinstance(given, str | os.PathLike):
        return kind(os.fspath(given))
    if isinstance(given, Mapping) and "folder" in given:
        return kind(**given)
    if not isinstance(given, kind):
        raise WrongType(
            f"«checkpoints={short(given)}» is neither a folder nor hocket.Checkpoints. Write «checkpoints='runs/a'», or "
            "«checkpoints=hocket.Checkpoints('runs/a', every='1ep', "
            "keep=3)¦checkpoints={'folder': 'runs/a', 'every': '1ep', 'keep': 3}»."
        )
    return given


def resume(given: str | Path | bool | None) -> str | Path | None:
    """Convert True to ``"auto"`` and False to None, and refuse files, which hold weights at most."""
    if isinstance(given, bool):
        return "auto" if given else None
    if isinstance(given, str | os.PathLike) and given != "auto" and "://" not in str(given) and Path(given).is_file():
        if not Path(given).suffix:
            return given  # the file `latest` of a folder of checkpoints
        raise WrongValue(
            f"«resume={str(given)!r}» is a file, and a run resumes from a checkpoint of hocket, which is a folder such as "
            f"'runs/a/ep3-ba18'. To begin with the weights of this file, call trainer.load_weights({str(given)!r})."
        )
    return given


def compiled(given: object) -> Mapping[str, Any] | None:
    """Convert True and the name of a mode to arguments of torch.compile; None to compile nothing."""
    if not isinstance(given, str):
        if not isinstance(given, bool | Mapping) and given is not None:
            raise WrongType(
                f"«compile={short(given)}» is neither «True» nor arguments of torch.compile. Write «compile=True»."
            )
        keys = list(inspect.signature(torch.compile).parameters)[1:]
        if unknown := [key for key in given or () if key not in keys] if isinstance(given, Mapping) else []:
            raise WrongType(
                f"«compile={short(given)}» has {unknown[0]!r}, which torch.compile does not take; it takes "
                f"{', '.join(keys)}. Write «compile=True», or «compile={{'mode': 'reduce-overhead'}}»."
            )
        return given if isinstance(given, Mapping) and given else {} if given is True else None
    if given not in _COMPILE_MODES:
        raise WrongValue(
            f"«compile={given!r}» is not a mode of torch.compile, which has {', '.join(map(repr, _COMPILE_MODES))}. Write "
            "«compile='reduce-overhead'», «compile=True», or its arguments: "
            "«compile={'mode': 'max-autotune', 'dynamic': False}»."
        )
    return {"mode": given}


def profile(given: object) -> Sequence[PluginLike]:
    """Convert batches to profile, or arguments of the profiler, to a list of that plug-in; None and False to none."""
    if given is None or given is False or given == []:
        return []
    if given is True:
        return ["profiler"]
    if isinstance(given, int | float):
        raise WrongType(
            f"«profile={given!r}» does not say which batches to profile. Write «profile='{given}ba after 10ba'», or "
            "«profile=True»."
        )
    if isinstance(given, Mapping) and "profiler" not in given:
        return [{"profiler": dict(given)}]
    if isinstance(given, str) and not given.strip().startswith("profiler"):
        return [{"profiler": {"window": given}}]
    return [given]


def switch(argument: str) -> Callable[[object], bool]:
    """Return the conversion of an argument that is True or False, for which None stands too, to a bool."""

    def convert(given: object) -> bool:
        if type(given).__name__ in ("bool", "bool_"):  # NumPy's too
            return bool(given)
        if given is not None and not isinstance(given, bool | int):
            meant = str(given).strip().lower() in ("true", "yes", "on", "1")
            raise WrongType(
                f"«{argument}={given!r}» is a switch, which is «True» or «False». Write «{argument}={meant}»."
            )
        return bool(given)

    return convert


def path(given: object) -> str | os.PathLike[str]:
    """Refuse a folder that is neither text nor a path."""
    if not isinstance(given, str | os.PathLike):
        raise WrongType(
            f"«folder={short(given)}» is {type(given).__name__}; give text or a path, such as «folder='runs'»."
        )
    return given


def folder(given: object) -> Path:
    """Refuse a folder of runs that is a URL, which would be a folder of this machine with its name, or in a file."""
    runs = Path(path(given))
    above = next((parent for parent in (runs, *runs.parents) if os.path.lexists(parent)), None)
    if above is not None and not above.is_dir() and runs != Path("runs"):  # the default may be unused
        raise WrongValue(
            f"«folder={str(given)!r}»: {above} is a file and no folder. Give a folder to write to, such as «folder='runs'»."
        )
    if "://" in str(given):
        raise WrongValue(
            f"«folder={str(given)!r}» is a URL, and the files of runs are written on this machine. Write «folder='runs'», and "
            f"copy them while training goes on: «loggers=[{{'artifacts': {{'url': {str(given)!r}}}}}]»; «checkpoints=» takes "
            "URLs."
        )
    return runs


def weights(given: object) -> str | os.PathLike[str] | Mapping[str, Any]:
    """Convert a module to its weights."""
    if isinstance(given, nn.Module):
        return given.state_dict()
    if not isinstance(given, str | os.PathLike | Mapping):
        raise WrongType(
            f"«weights={short(given)}» is {type(given).__name__}; give a file or folder, tensors by name, or a module. Write "
            "trainer.load_weights('model.pt')."
        )
    return given


def tree(given: object) -> Mapping[str, Any]:
    """Refuse weights in the place of a Trainer's state."""
    if not isinstance(given, Mapping) or "version" not in given:
        keys = ", ".join(map(str, list(given)[:3])) if isinstance(given, Mapping) else type(given).__name__
        raise WrongValue(
            f"load_state_dict was given {keys} …, and not what trainer.state_dict() returns: the state of a whole run. "
            "For weights write trainer.load_weights(state_dict)."
        )
    return given
