"""Translate the arguments of Composer's Trainer."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import hocket
import hocket.plugins
from hocket.errors import WrongType, WrongValue
from hocket_migration.composer.core import algorithm as algorithms, callback as callbacks
from hocket_migration.composer.core.data_spec import DataSpec
from hocket_migration.composer.core.evaluator import Evaluator, ensure_evaluator
from hocket_migration.composer.core.precision import Precision
from hocket_migration.composer.core.state import State
from hocket_migration.composer.core.time import Time, TimeUnit
from hocket_migration.composer.loggers import logger_destination
from hocket_migration.composer.loggers.vendors import ConsoleLogger, ProgressBarLogger
from hocket_migration.composer.plugin_factory import make

#: What to write for arguments of other versions.
_FORMER = {
    "grad_clip_norm": "algorithms=[GradientClipping('norm', 1.0)]",
    "grad_accum": "device_train_microbatch_size=",
    "train_device_microbatch_size": "device_train_microbatch_size=",
    "deepspeed_config": "hocket={'strategy': {'deepspeed': {…}}}",
    "fsdp_auto_wrap": "parallelism_config={'fsdp': {…}}",
    "dataloader": "train_dataloader=",
}


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that Composer's Trainer does not have."""
    if not unknown:
        return
    from hocket_migration.composer.trainer import Trainer

    known = [name for name in inspect.signature(Trainer).parameters if name != "unknown"]
    name = next(iter(unknown))
    near = difflib.get_close_matches(name, known, 1)
    write = _FORMER.get(name) or (f"{near[0]}=" if near else None)
    own = f"hocket={{{name!r}: …}}" if name in inspect.signature(hocket.Trainer).parameters else None
    raise WrongType(
        f"Trainer has no argument {name}=. "
        + (f"Write {own or write}." if own or write else f"It has {', '.join(known)}.")
    )


def as_list(given: Any) -> list[Any]:
    """Return a list of one thing or several; empty for None."""
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def make_trainer(task: Any, translated: dict[str, Any], own: Mapping[str, Any]) -> hocket.Trainer:
    """Return hocket's Trainer. Its own arguments replace translated ones; lists of plug-ins are added to them."""
    unknown = [name for name in own if name not in inspect.signature(hocket.Trainer).parameters or name == "model"]
    if unknown:
        raise WrongType(f"hocket={{{unknown[0]!r}: …}}: hocket.Trainer has no such argument, or it is given already.")
    merged = {**translated, **own}
    for kind in ("algorithms", "callbacks", "loggers"):
        if kind in own:
            merged[kind] = [*translated[kind], *own[kind]]
    return hocket.Trainer(task, **merged)


def duration_of(given: int | str | Time | None, ssr: float) -> Time | None:
    """Return a duration, scaled. Raises ValueError if it is not a time."""
    if given is None:
        return None
    time = Time.from_input(given, "ep")
    if time.unit in (TimeUnit.ITERATION, TimeUnit.DURATION):
        raise WrongValue(f"max_duration='{time}' is not a duration. Write '10ep', '1000ba', '1e6sp' or '1e9tok'.")
    if time.value <= 0:
        raise WrongValue(f"max_duration='{time}' has to be more than 0. Write '10ep', '1000ba', '1e6sp' or '1e9tok'.")
    if ssr <= 0:
        raise WrongValue(f"scale_schedule_ratio={ssr} has to be greater than 0, such as 0.5 for half of the run.")
    scaled = Time(int(time.value * ssr), time.unit)
    if not scaled.value:
        raise WrongValue(
            f"max_duration='{time}' times scale_schedule_ratio={ssr} is not a time. Give the duration in 'ba'."
        )
    return scaled


def optimizer_of(given: Any, model: Any) -> Optimizer | None:
    """Return the optimizer; without one, Composer's default. Raises ValueError for several."""
    optimizers = as_list(given)
    if len(optimizers) > 1:
        raise WrongValue(
            f"optimizers= takes one optimizer, and was given {len(optimizers)}. Use a hocket.Task for several."
        )
    if optimizers:
        if not isinstance(optimizers[0], Optimizer):
            raise WrongType(
                f"optimizers={optimizers[0]!r} is not an optimizer. Write DecoupledAdamW(model.parameters(), lr=1e-3)."
            )
        return optimizers[0]
    parameters = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        return None
    made: Optimizer = make("optimizers", "decoupled-sgdw", params=parameters, lr=0.1)
    return made


def precision_of(given: Any, device: Any) -> Precision:
    """Return a precision; by default 16 bits on a GPU, as in Composer."""
    if given is None:
        gpu = torch.cuda.is_available() and device_of(device) in ("auto", "cuda")
        return Precision.AMP_FP16 if gpu else Precision.FP32
    try:
        return Precision(given)
    except ValueError:
        raise WrongValue(
            f"precision={given!r} is not one of Composer's: {', '.join(Precision)}. Others: hocket={{'precision': …}}."
        ) from None


_DEVICES = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu", "mps": "mps", "tpu": "xla"}


def device_of(given: Any) -> str:
    """Return hocket's device."""
    if given is None:
        return "auto"
    name = given if isinstance(given, str) else getattr(given, "name", given)
    if name not in _DEVICES:
        raise WrongValue(
            f"device={given!r} is not one of {', '.join(map(repr, _DEVICES))}. Others: hocket={{'device': …}}."
        )
    return _DEVICES[name]


def microbatch_of(given: Any) -> Any:
    """Return samples per forward pass. Raises ValueError for a fraction of a sample and for other types."""
    if isinstance(given, float):
        raise WrongValue(
            f"device_train_microbatch_size={given}: hocket has no fractions of a sample. Give a whole number."
        )
    if given not in (None, "auto") and not (isinstance(given, int) and given >= 1):
        raise WrongValue(
            f"device_train_microbatch_size={given!r} is not a number of samples. Give a whole number of 1 or more, or 'auto'."
        )
    return given


#: Options of FSDP that change nothing but speed here, or nothing at all.
_ANY = {
    "state_dict_type",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "sync_module_states",
    "verbose",
}
#: Those that hocket has one value of.
_FIXED = {
    "activation_checkpointing": False, "activation_cpu_offload": False, "auto_wrap": True, "cpu_offload": False,
    "mixed_precision": "DEFAULT", "use_orig_params": True,
}  # fmt: skip


def strategy_of(parallelism: Any, fsdp: Any, timeout: float = 300.0) -> Any:
    """Return hocket's strategy. Raises ValueError for options without a counterpart."""
    strategy = _strategy(parallelism, fsdp)
    if timeout == 300.0 or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return strategy
    return {"ddp" if strategy == "auto" else strategy: {"timeout": timeout}}


def _strategy(parallelism: Any, fsdp: Any) -> str:
    given = parallelism if isinstance(parallelism, Mapping) or parallelism is None else vars(parallelism)
    given = {name: value for name, value in (given or {}).items() if value is not None}
    if fsdp is not None:
        given["fsdp"] = fsdp
    if "fsdp2" in given:
        given["fsdp"] = given.pop("fsdp2")
    if "tp" in given:
        raise WrongValue(
            "parallelism_config={'tp': …}: write hocket={'strategy': {'tensor-parallel': {…}}}, with a plan of layers."
        )
    if "fsdp" not in given:
        return "auto"
    config = given["fsdp"]
    options: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    others = {name: value for name, value in options.items() if name not in {*_ANY, "sharding_strategy"}}
    for name, value in others.items():
        if name not in _FIXED or value != _FIXED[name]:
            raise WrongValue(
                f"parallelism_config={{'fsdp': {{{name!r}: {value!r}}}}} has no counterpart. Write hocket's own: "
                "hocket={'strategy': {'fsdp': {…}}}; see docs/reference/strategies.md."
            )
    sharding = str(
        getattr(options.get("sharding_strategy"), "name", options.get("sharding_strategy", "FULL_SHARD"))
    ).upper()
    if sharding == "NO_SHARD":
        return "ddp"
    if sharding not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise WrongValue(
            f"sharding_strategy={sharding!r}: write hocket={{'strategy': {{'fsdp': {{…}}}}}} for other meshes."
        )
    return "fsdp"


def evaluators_of(given: Any) -> list[Evaluator]:
    """Return evaluators. Raises ValueError for several without labels, and for two of one label."""
    if given is None or (isinstance(given, list | tuple) and not given):
        return []
    listed = (
        list(given) if isinstance(given, list | tuple) and any(isinstance(e, Evaluator) for e in given) else [given]
    )
    if isinstance(given, list | tuple) and all(isinstance(each, DataLoader | DataSpec) for each in given):
        raise WrongValue(
            f"eval_dataloader= was given {len(given)} loaders. Write [Evaluator(label='first', dataloader=loader), …]."
        )
    if any(isinstance(each, Evaluator) for each in listed) and not all(isinstance(each, Evaluator) for each in listed):
        raise WrongValue(
            "eval_dataloader= mixes Evaluators and other data. Write Evaluator(label=…, dataloader=…) for all."
        )
    evaluators = [ensure_evaluator(each) for each in listed]
    labels = [each.label for each in evaluators]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise WrongValue(f"Two evaluators are labelled {twice[0]!r}. Give each its own label.")
    return evaluators


def _check_made(given: Any, argument: str) -> None:
    """Raise TypeError for a class or function that was not called."""
    if isinstance(given, type) or inspect.isfunction(given):
        raise WrongType(f"{argument}= was given {given.__name__} itself. Write {given.__name__}(…).")


def algorithm(given: Any, view: State) -> Any:
    """Return an algorithm for hocket's Trainer: hocket's own as it is, one with Composer's interface in an adapter."""
    _check_made(given, "algorithms")
    return algorithms.adapted(given, view) if isinstance(given, algorithms.Algorithm) else given


def callback(given: Any, view: State) -> Any:
    """Return a callback for hocket's Trainer."""
    _check_made(given, "callbacks")
    return callbacks.adapted(given, view) if isinstance(given, callbacks.Callback) else given


def logger(given: Any, view: State) -> Any:
    """Return a logger for hocket's Trainer."""
    _check_made(given, "loggers")
    if isinstance(given, logger_destination.LoggerDestination):
        return logger_destination.adapted(given, view)
    return given


def bars(progress: bool, console: bool, stream: Any, every: Any, given: Sequence[Any]) -> list[Any]:
    """Return the progress bar and the console logger, unless one was given."""
    makers = {"progress": lambda: ProgressBarLogger(stream), "console": lambda: ConsoleLogger(every, stream)}
    wanted = {"progress": progress, "console": console}
    return [
        makers[name]()
        for name, asked in wanted.items()
        if asked and not any(isinstance(each, hocket.plugins.get("loggers", name)) for each in given)
    ]
