"""Lightning's Trainer arguments as those of `hocket.Trainer`. What hocket cannot do is refused by name."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from hocket.errors import WrongType, WrongValue
from hocket_migration.lightning.installed_lightning import package_of

DEVICES = {"auto": "auto", "cpu": "cpu", "gpu": "auto", "cuda": "cuda", "mps": "mps", "tpu": "xla"}
STRATEGIES: dict[str, Any] = {
    "auto": "auto",
    "single_device": "single",
    "ddp": "ddp",
    "ddp_spawn": "ddp",
    "ddp_fork": "ddp",
    "ddp_notebook": "ddp",
    "ddp_find_unused_parameters_true": {"ddp": {"find_unused_parameters": True}},
    "ddp_find_unused_parameters_false": "ddp",
    "fsdp": "fsdp",
}
PRECISIONS = {
    "32": "fp32", "32-true": "fp32", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16",
    "16-true": "fp16-true", "bf16-true": "bf16-true", "64": "fp64", "64-true": "fp64",
}  # fmt: skip

#: Arguments of earlier versions of Lightning, and what to write.
EARLIER: Mapping[str, str] = {
    "resume_from_checkpoint": "trainer.fit(…, ckpt_path=…)",
    "gpus": "accelerator='gpu', devices=…",
    "tpu_cores": "accelerator='tpu', devices=…",
    "num_processes": "accelerator='cpu', devices=…",
    "progress_bar_refresh_rate": "enable_progress_bar=False for no progress, or omit it",
    "checkpoint_callback": "enable_checkpointing=…",
    "weights_summary": "enable_model_summary=…",
    "weights_save_path": "default_root_dir=…",
    "auto_lr_find": "nothing; hocket sweep finds a learning rate",
    "auto_scale_batch_size": "hocket={'microbatch': 'auto'}",
    "amp_level": "precision='16-mixed'",
    "distributed_backend": "strategy=…",
}

#: Methods of earlier versions of Lightning, and what to define instead.
NOT_CALLED: Mapping[str, str] = {
    "training_epoch_end": "on_train_epoch_end(self), with the outputs of the steps in an attribute",
    "validation_epoch_end": "on_validation_epoch_end(self), with the outputs of the steps in an attribute",
    "test_epoch_end": "on_test_epoch_end(self), with the outputs of the steps in an attribute",
    "configure_sharded_model": "configure_model(self)",
}

#: Arguments that are refused unless they have their default, and what to write.
_REFUSED: dict[str, tuple[Any, str]] = {
    "plugins": ((None, []), "Give the precision as precision=…, and other plug-ins of hocket in hocket={…}"),
    "barebones": (
        (False,),
        "Switch off what it would: logger=False, enable_checkpointing=False, enable_progress_bar=False",
    ),
    "model_registry": ((None,), "Upload the checkpoint by a logger of hocket, such as hocket={'loggers': ['wandb']}"),
    "sync_batchnorm": (
        (False,),
        "Convert the module before it is given: torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)",
    ),
    "num_nodes": ((1,), "Start the script by torchrun --nnodes=…, whose processes hocket uses, and omit num_nodes="),
}
#: Arguments that take a name, and no object of Lightning's.
BY_NAME = ("strategy", "plugins")
#: Values of ``ckpt_path=`` that are refused.
REFUSED_PATHS = ("hpc", "registry")
#: The parameter of a step that fetches its batches itself, which is refused.
BATCHES = "dataloader_iter"


_DATA = {"model", "train_data", "eval_data", "data"}


@functools.cache
def _hockets() -> set[str]:
    import hocket  # with torch, which `hocket migrate inspect` does without

    return set(inspect.signature(hocket.Trainer).parameters)


def unknown(name: str, known: Mapping[str, Any]) -> str:
    """Return what to say of an argument that Lightning's Trainer does not have."""
    if name in EARLIER:
        return f"Trainer({name}=…) is not an argument of Lightning 2. Write {EARLIER[name]}."
    if name in _hockets():
        return f"Trainer({name}=…) is an argument of hocket.Trainer. Write Trainer(hocket={{{name!r}: …}})."
    near = difflib.get_close_matches(name, known, 1)
    return f"Trainer({name}=…) is not an argument of Lightning's Trainer." + (
        f" Did you mean {near[0]}=?" if near else f" It has {', '.join(known)}."
    )


def of_environment(framework: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that variables such as ``PL_TRAINER_MAX_EPOCHS`` give, as Lightning reads them."""
    parse = importlib.import_module(f"{framework.__name__}.utilities.argparse")._parse_env_variables
    return {name: value for name, value in vars(parse(framework.Trainer)).items() if name in known}


def checked_hocket(given: Any) -> dict[str, Any]:
    """Return the arguments in ``Trainer(hocket={…})``. Raises TypeError if `hocket.Trainer` does not take one, or not here."""
    if not isinstance(given, Mapping | None):
        raise WrongType(
            f"Trainer(hocket={given!r}) is not a mapping. Give arguments of hocket.Trainer by name, such as "
            "hocket={'algorithms': ['ema']}."
        )
    for name in given or ():
        if name in _DATA or name not in _hockets():
            raise WrongType(
                f"Trainer(hocket={{{name!r}: …}}) is not an argument of hocket.Trainer that can be given here. Model and "
                f"data are given to fit; the others are {', '.join(sorted(_hockets() - _DATA))}."
            )
    return dict(given or {})


def refuses(name: str, value: Any) -> bool:
    """Whether the drop-in Trainer refuses a value of one of its arguments, on any machine."""
    if name == "accelerator" and value in [*DEVICES]:
        return False
    given: dict[str, Any] = defaultdict(lambda: None)
    given |= {each: defaults[0] for each, (defaults, _) in _REFUSED.items()}
    given |= {"accelerator": "auto", "devices": "auto", "strategy": "auto", "accumulate_grad_batches": 1, name: value}
    try:
        translated(given)
    except (TypeError, ValueError):
        return True
    return False


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `hocket.Trainer` but those that depend on the data.

    Raises:
        TypeError, ValueError: an argument is invalid or has no counterpart; the message says what to write.
    """
    for name, (defaults, write) in _REFUSED.items():
        if given[name] not in defaults:
            raise WrongType(f"Trainer({name}={given[name]!r}) has no counterpart in hocket. {write}.")
    _check_numbers(given)
    found: dict[str, Any] = {
        "device": _device(given["accelerator"]),
        "devices": _devices(given["devices"], given["accelerator"]),
        "strategy": _strategy(given["strategy"]),
        "precision": _precision(given["precision"]),
        "deterministic": _deterministic(given["deterministic"]),
        "detect_anomaly": bool(given["detect_anomaly"]),
        "log_every": f"{given['log_every_n_steps'] or 50}ba",
        "profile": _profile(given["profiler"]),
        "duration": duration(given),
        "min_duration": _min_duration(given),
    }
    if given["accumulate_grad_batches"] != 1:
        found["accumulate"] = f"{given['accumulate_grad_batches']}ba"
    kind = getattr(given["gradient_clip_algorithm"], "value", given["gradient_clip_algorithm"]) or "norm"
    if kind not in ("norm", "value"):
        raise WrongValue(f"Trainer(gradient_clip_algorithm={kind!r}) is neither 'norm' nor 'value'.")
    if given["gradient_clip_val"]:
        found["clip_gradients"] = (kind, float(given["gradient_clip_val"]))
    if given["fast_dev_run"]:
        found["fast_dev_run"] = int(given["fast_dev_run"])
    for name in ("train", "predict"):
        limit = given[f"limit_{name}_batches"]
        if name == "train" and given["overfit_batches"]:
            limit = given["overfit_batches"]
        if limit and not (isinstance(limit, float) and limit == 1.0):
            found[f"limit_{name}"] = limit
    return {name: value for name, value in found.items() if value is not None}


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a number of batches or epochs that cannot be one."""
    for name in (*(f"limit_{each}_batches" for each in ("train", "val", "test", "predict")), "overfit_batches"):
        limit = given[name]
        share = isinstance(limit, float) and 0 <= limit <= 1
        if limit is not None and not share and not (isinstance(limit, int) and limit >= 0):
            raise WrongValue(
                f"Trainer({name}={limit!r}) is neither a number of batches nor a share from 0.0 to 1.0. Write {name}=10, or "
                f"{name}=0.5."
            )
    for name, least in (("accumulate_grad_batches", 1), ("max_epochs", -1), ("max_steps", -1)):
        if (number := given[name]) is not None and not (isinstance(number, int) and number >= least):
            raise WrongValue(f"Trainer({name}={number!r}) has to be an int of {least} or more. Write {name}=1, say.")
    if not isinstance(reload := given["reload_dataloaders_every_n_epochs"] or 0, int) or reload < 0:
        raise WrongValue(
            f"Trainer(reload_dataloaders_every_n_epochs={reload!r}) is not a number of epochs. Write an int of 0 or more."
        )
    interval, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    share = isinstance(interval, float) and 0 <= interval <= 1
    if isinstance(interval, int | float) and not share and not (isinstance(interval, int) and interval >= 1):
        raise WrongValue(
            f"Trainer(val_check_interval={interval!r}) is neither a number of batches nor a share of an epoch. Write "
            "val_check_interval=100, or val_check_interval=0.5; for no validation, limit_val_batches=0."
        )
    if epochs is None and isinstance(interval, float):
        raise WrongValue(
            f"Trainer(val_check_interval={interval!r}, check_val_every_n_epoch=None): a share of an epoch counts within one. "
            "Write a number of batches, such as val_check_interval=100, or omit check_val_every_n_epoch."
        )
    if epochs is not None and not (isinstance(epochs, int) and epochs >= 1):
        raise WrongValue(
            f"Trainer(check_val_every_n_epoch={epochs!r}) is not a number of epochs. Write an int of 1 or more; for no "
            "validation, limit_val_batches=0."
        )


def _device(given: Any) -> str:
    if not isinstance(given, str) or given not in DEVICES:
        raise WrongValue(f"Trainer(accelerator={given!r}) is not known. Write one of {', '.join(map(repr, DEVICES))}.")
    if not _has(given):
        raise WrongValue(f"Trainer(accelerator={given!r}): there is no such device here. Write 'auto', or 'cpu'.")
    return DEVICES[given]


def _has(accelerator: str) -> bool:
    """Whether a device of this kind is available."""
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    has = {"gpu": cuda or mps, "cuda": cuda, "mps": mps, "tpu": find_spec("torch_xla") is not None}
    return has.get(accelerator, True)


def _devices(given: Any, accelerator: str) -> int | None:
    if given in ("auto", None):
        return None
    if isinstance(given, str) and given.lstrip("-").isdigit():
        given = int(given)
    if isinstance(given, list | tuple) and list(given) == list(range(len(given))):
        given = len(given)
    if not isinstance(given, int) or isinstance(given, bool):
        raise WrongValue(
            f"Trainer(devices={given!r}) chooses among devices. Give their number, and choose by the environment: "
            "CUDA_VISIBLE_DEVICES=1,3 python train.py."
        )
    if given < -1 or not given:
        raise WrongValue(f"Trainer(devices={given!r}) is not a device. Write devices=1 or more, -1 for all, or 'auto'.")
    if given == -1:
        import torch

        given = torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 1
    return None if given <= 1 else given


def _strategy(given: Any) -> Any:
    if isinstance(given, str) and given in STRATEGIES:
        return STRATEGIES[given]
    name = given if isinstance(given, str) else type(given).__name__
    if name == "DDPStrategy":
        raise WrongValue(
            "Trainer(strategy=DDPStrategy(…)) is an object of Lightning's. Write strategy='ddp', or "
            "'ddp_find_unused_parameters_true'; other options are hocket's: hocket={'strategy': {'ddp': {…}}}."
        )
    raise WrongValue(
        f"Trainer(strategy={name!r}) is not translated. Translated are {', '.join(map(repr, STRATEGIES))}. Give another one "
        "and its options by hocket: hocket={'strategy': {'fsdp': {…}}}."
    )


def _precision(given: Any) -> str:
    name = "32" if given is None else str(given)
    if name not in PRECISIONS:
        raise WrongValue(
            f"Trainer(precision={given!r}) is not translated. Translated are {', '.join(map(repr, PRECISIONS))}; hocket has "
            "more: hocket={'precision': 'fp8'}."
        )
    return PRECISIONS[name]


def _deterministic(given: Any) -> bool:
    if given == "warn":
        raise WrongValue("Trainer(deterministic='warn') has no counterpart. Write True, or omit it.")
    return bool(given)


def is_profiler(given: Any, name: str = "Profiler") -> bool:
    """Whether an object is a profiler of Lightning's, of the class of this name."""
    return any(base.__name__ == name and package_of(base) is not None for base in type(given).__mro__)


def _profile(given: Any) -> Any:
    if given is None:
        return None
    if is_profiler(given):
        return None if is_profiler(given, "PassThroughProfiler") else True
    if given in ("simple", "advanced", "pytorch"):
        return True
    what = repr(given) if isinstance(given, str) else f"{type(given).__name__}(…)"
    raise WrongType(
        f"Trainer(profiler={what}) is not used by hocket. Write profiler='simple', or hocket={{'profile': '5ba after 10ba'}}."
    )


def duration(given: Mapping[str, Any], steps_are_batches: bool = True) -> Any:
    """Return the length of training: the first of epochs, steps and time to be over, without steps that are not batches.

    A length of 0, for which the drop-in Trainer trains nothing, is 1 here.
    """
    epochs, steps, seconds = given["max_epochs"], given["max_steps"], given["max_time"]
    if epochs is None and steps in (-1, None) and seconds is None:
        epochs = 1000
    found = []
    if epochs is not None and epochs != -1:
        found.append(f"{epochs or 1}ep")
    if steps not in (-1, None):
        found.append(f"{(steps or 1) if steps_are_batches else 2**31}ba")
    if seconds is not None:
        found.append(f"{seconds_of(seconds) or 1:g}s")
    if not found:
        return f"{2**31}ep"
    return found[0] if len(found) == 1 else found


def seconds_of(given: Any) -> float:
    if isinstance(given, Mapping):
        given = timedelta(**given)
    if isinstance(given, str):
        parts = given.split(":")
        if len(parts) != 4:
            raise WrongValue(f"Trainer(max_time={given!r}) is not in the form 'DD:HH:MM:SS'.")
        days, hours, minutes, seconds = map(int, parts)
        given = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return given.total_seconds()


def _min_duration(given: Mapping[str, Any]) -> str | None:
    """Return what requests of hocket's plug-ins to stop respect; `TrainerView.stops` has both for ``trainer.should_stop``."""
    epochs, steps = given["min_epochs"], given["min_steps"]
    return f"{epochs}ep" if epochs else f"{steps}ba" if steps else None
