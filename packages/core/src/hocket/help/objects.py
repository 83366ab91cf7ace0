"""Objects where names are expected, and names where objects are: arguments whose meaning is plain are converted."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket import elsewhere
from hocket.errors import WrongType, WrongValue
from hocket.help import names, warn

#: Functions of torch.nn.functional that are losses of (outputs, targets), and the names that people use for them.
_LOSSES = {
    "cross_entropy": "crossentropy crossentropyloss ce celoss categoricalcrossentropy sparsecategoricalcrossentropy xent",
    "binary_cross_entropy_with_logits": "bcewithlogits bcewithlogitsloss bcelogits",
    "binary_cross_entropy": "bce bceloss binarycrossentropy",
    "mse_loss": "mse mseloss l2 l2loss meansquarederror squarederror",
    "l1_loss": "l1 l1loss mae meanabsoluteerror",
    "smooth_l1_loss": "smoothl1 smoothl1loss",
    "huber_loss": "huber huberloss",
    "nll_loss": "nll nllloss negativeloglikelihood",
    "kl_div": "kl kldiv kldivloss kldivergence",
    "poisson_nll_loss": "poisson poissonnllloss poissonnll",
    "soft_margin_loss": "softmargin softmarginloss",
    "multilabel_soft_margin_loss": "multilabelsoftmarginloss",
    "multi_margin_loss": "multimarginloss hinge",
}
_PRECISIONS = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}
_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def short(value: Any) -> str:
    """Return a value as text of one short line."""
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{getattr(value, '__qualname__', value)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module) or type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__}(…)"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"{type(value).__name__}(…)"


def precision(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert a torch.dtype to the precision that computes in it, and keeps weights in float32 if it is 16-bit."""
    if not isinstance(given, torch.dtype):
        return given
    found = _PRECISIONS.get(given)
    if found is None:
        raise WrongType(
            f"«precision={given}» is not a precision. Write one of 'fp32', 'bf16', 'fp16', 'fp64', or another of "
            "`hocket plugins list --kind precisions`."
        )
    if found in ("fp16", "bf16"):
        warn(
            f"«precision={given}» is read as «precision='{found}'»: autocast, with weights in float32. Write that, or "
            f"'{found}-true' for weights in {given} too."
        )
    return found


def device(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert a torch.device, or text with an index such as ``"cuda:0"``, to the name of its kind."""
    found = given if isinstance(given, torch.device) else None
    if isinstance(given, str) and re.fullmatch(r"(cpu|cuda|mps|xla):\d+", given):
        found = torch.device(given)
    if found is None:
        return given
    if found.index:
        raise WrongValue(
            f"«device='{found}'» chooses one of several devices. hocket takes the first that is visible, or one for each "
            f"process with «devices=». Write «device='{found.type}'», and choose with the environment: "
            f"CUDA_VISIBLE_DEVICES={found.index}."
        )
    return found.type


def named_loss(text: str) -> str | None:
    """Return the function of torch.nn.functional that a text names, or None."""
    wanted = names.plain(text.rpartition(".")[2])
    return next(
        (name for name, others in _LOSSES.items() if wanted == names.plain(name) or wanted in others.split()), None
    )


def loss(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert the name of a loss in torch, or its class, to a function of (outputs, targets)."""
    if isinstance(given, str):
        if name := named_loss(given):
            wanted = names.plain(given.rpartition(".")[2])
            if wanted.removesuffix("loss") != names.plain(name).removesuffix("loss"):
                warn(f"«loss={given!r}» is read as «loss=torch.nn.functional.{name}».")
            return getattr(nn.functional, name)
        near = difflib.get_close_matches(given, _LOSSES, 1)
        raise WrongValue(
            f"«loss={given!r}» is not the name of a loss.{f' Did you mean {near[0]!r}?' if near else ''} Give a function of "
            "(outputs, targets), such as «loss=torch.nn.functional.cross_entropy», or one of these names: "
            f"{', '.join(map(repr, _LOSSES))}."
        )
    if isinstance(given, type) and issubclass(given, nn.Module):
        return _instance(given, "loss")
    if given is not None and not callable(given):
        raise WrongType(
            f"«loss={short(given)}» is {type(given).__name__}, which cannot be called. Give a function of (outputs, "
            "targets), such as «loss=torch.nn.functional.cross_entropy»; a Task defines several losses as a dict."
        )
    return given


def metrics(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert one metric, a class, a name or a list of them to metrics by name."""
    from hocket.training import simple_metrics

    def one(each: Any) -> tuple[str, Any]:
        if isinstance(each, str):
            found = simple_metrics.find(each)
            if found is None:
                raise WrongValue(
                    f"«metrics={each!r}» is not one of hocket's own metrics: {', '.join(simple_metrics.METRICS)}. Others "
                    f"come from torchmetrics: «metrics={{{each!r}: torchmetrics.classification.MulticlassAccuracy(10)}}», "
                    "for instance; or write an object with update, compute and reset."
                )
            return found, simple_metrics.METRICS[found]()
        if isinstance(each, type):
            return each.__name__, _instance(each, "metrics")
        if callable(each) and not hasattr(each, "update") and _required(each) == []:  # a function that makes it
            return one(each())
        return type(each).__name__, each

    if isinstance(given, Mapping):
        return {name: one(each)[1] for name, each in given.items()}
    is_one = isinstance(given, str | type) or (hasattr(given, "update") and hasattr(given, "compute"))
    if not is_one and not isinstance(given, Sequence | set):
        if given is not None and (not callable(given) or _required(given)):
            raise WrongType(
                f"«metrics={short(given)}» is neither metrics nor a function without arguments that makes them. A metric is an "
                "object with update(outputs, targets), compute() and reset(). Write «metrics='accuracy'», or «metrics={'mine': "
                "MyMetric()}¦metrics={'mine': 'module:MyMetric'}»."
            )
        return given
    found = [one(each) for each in ([given] if is_one else given)]
    if len(dict(found)) < len(found):
        listed = ", ".join(name for name, _ in found)
        raise WrongValue(
            f"«metrics=» lists {listed}: some have one name. Name each: «metrics={{'first': …, 'second': …}}»."
        )
    return dict(found)


def _required(function: Any) -> list[str] | None:
    """Return the arguments that a function needs; None if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
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
        return ", ".join(str(each).split(":")[0] for each in inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return "…"


def checkpoints(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert a folder, True or a dict of arguments to Checkpoints."""
    if given is None or given is False:
        return None
    Checkpoints = elsewhere.module("hocket_checkpoints.policy", "checkpoints=").Checkpoints
    if given is True:
        folder = str(Path(arguments.get("folder", "runs")) / "checkpoints")
        warn(f"«checkpoints=True» is read as «checkpoints={folder!r}». Write the folder, so that each run has its own.")
        return Checkpoints(folder)
    if isinstance(given, str | os.PathLike):
        return Checkpoints(os.fspath(given))
    if isinstance(given, Mapping) and "folder" in given:
        return Checkpoints(**given)
    if not isinstance(given, Checkpoints):
        raise WrongType(
            f"«checkpoints={short(given)}» is neither a folder nor hocket.Checkpoints. Write «checkpoints='runs/a'», or "
            "«checkpoints=hocket.Checkpoints('runs/a', every='1ep', "
            "keep=3)¦checkpoints={'folder': 'runs/a', 'every': '1ep', 'keep': 3}»."
        )
    return given


def resume(given: Any, arguments: Mapping[str, Any]) -> Any:
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


def compiled(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert the name of a mode of torch.compile to its arguments."""
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
        return given
    if given not in _COMPILE_MODES:
        raise WrongValue(
            f"«compile={given!r}» is not a mode of torch.compile, which has {', '.join(map(repr, _COMPILE_MODES))}. Write "
            "«compile='reduce-overhead'», «compile=True», or its arguments: "
            "«compile={'mode': 'max-autotune', 'dynamic': False}»."
        )
    return {"mode": given}


def seed(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Refuse text, with the number in it."""
    if isinstance(given, str):
        write = (
            f"seed={int(given)}" if given.strip().isdecimal() else "«seed=17», or «None» for the global random numbers"
        )
        raise WrongType(f"«seed={given!r}» is text; a seed is an int. Write {write}.")
    return given


def plugins(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert one plug-in, as a name, an instance or a class, to a list of one, and None or False to none.

    A mapping of names to arguments becomes a list of such mappings with one name each.
    """
    if given is None or given is False:
        return []
    if isinstance(given, Mapping):
        return [{name: config} for name, config in given.items()]
    single = isinstance(given, type | str) or not isinstance(given, Sequence | bool | int | float)
    return [given] if single else given


def profile(given: Any, arguments: Mapping[str, Any]) -> Any:
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


def flag(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Refuse a switch that is neither True nor False; None stands for False."""
    if type(given).__name__ in ("bool", "bool_") and hasattr(given, "item"):
        given = given.item()  # of NumPy
    if given is not None and not isinstance(given, bool | int):
        argument = next((name for name, value in arguments.items() if value is given), "argument")
        meant = str(given).strip().lower() in ("true", "yes", "on", "1")
        raise WrongType(f"«{argument}={given!r}» is a switch, which is «True» or «False». Write «{argument}={meant}».")
    return bool(given)


def folder(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Refuse a folder that is neither text nor a path."""
    if not isinstance(given, str | os.PathLike):
        raise WrongType(
            f"«folder={short(given)}» is {type(given).__name__}; give text or a path, such as «folder='runs'»."
        )
    above = next((each for each in (Path(given), *Path(given).parents) if os.path.lexists(each)), None)
    if above is not None and not above.is_dir() and "model" in arguments:
        raise WrongValue(
            f"«folder={str(given)!r}»: {above} is a file and no folder. Give a folder to write to, such as «folder='runs'»."
        )
    return given


def weights(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Convert a module to its weights."""
    if isinstance(given, nn.Module):
        return given.state_dict()
    if not isinstance(given, str | os.PathLike | Mapping):
        raise WrongType(
            f"«weights={short(given)}» is {type(given).__name__}; give a file or folder, tensors by name, or a module. Write "
            "trainer.load_weights('model.pt')."
        )
    return given


def tree(given: Any, arguments: Mapping[str, Any]) -> Any:
    """Refuse weights in the place of a Trainer's state."""
    if not isinstance(given, Mapping) or "version" not in given:
        keys = ", ".join(map(str, list(given)[:3])) if isinstance(given, Mapping) else type(given).__name__
        raise WrongValue(
            f"load_state_dict was given {keys} …, and not what trainer.state_dict() returns: the state of a whole run. "
            "For weights write trainer.load_weights(state_dict)."
        )
    return given


Conversion = Callable[[Any, Mapping[str, Any]], Any]
#: By argument, for every function that has one of that name.
CONVERSIONS: Mapping[str, Conversion] = {
    "precision": precision, "device": device, "loss": loss, "metrics": metrics, "train_metrics": metrics,
    "checkpoints": checkpoints, "resume": resume, "compile": compiled, "seed": seed,
    "deterministic": flag, "detect_anomaly": flag, "profile_plugins": flag, "summary": flag, "folder": folder,
    "weights": weights, "tree": tree, "algorithms": plugins, "callbacks": plugins, "loggers": plugins, "profile": profile,
}  # fmt: skip
