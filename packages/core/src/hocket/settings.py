"""From the Trainer's arguments to checked parts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.torch_version import TorchVersion

from hocket import launching
from hocket.algorithm import Need
from hocket.devices import Device
from hocket.devices.cuda import CUDA
from hocket.hookspecs import PrecisionLike, StrategyLike
from hocket.plugins import catalog
from hocket.plugins.errors import AmbiguousPluginError, BrokenPluginError, PluginError, said
from hocket.plugins.spec import Voice, build

#: What "auto" looks for where there are several processes.
_ROLE = "distributed-strategy"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    #: Everything that is attached to the bus.
    voices: list[Voice]
    strategy: StrategyLike
    precision: PrecisionLike
    device: Device
    #: What was chosen for ``"auto"``, and why.
    reasons: Mapping[str, str]


def resolve(
    *,
    strategy: Any,
    precision: Any,
    device: Any,
    actions: Any = "default",
    algorithms: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    loggers: Sequence[Any] = (),
    devices: int | None = None,
) -> Parts:
    """Import and make what the arguments name, and nothing else."""
    reasons: dict[str, str] = {}
    processes = _check_devices(devices)
    if strategy == "auto":
        strategy, reasons["strategy"] = _auto_strategy(processes)
    if device == "auto":
        device, reasons["device"] = _auto_device()
    one = {
        kind: build(kind, given)
        for kind, given in {
            "strategies": strategy, "precisions": precision, "actions": actions, "devices": device,
        }.items()
    }  # fmt: skip
    if processes > 1:
        if not one["strategies"].obj.distributed:
            raise ValueError(
                f"devices={devices}, but strategy='{one['strategies'].name}' trains in one process. Leave out strategy=, "
                "or devices=."
            )
        one["devices"].obj.torch_device(processes - 1)  # raises if there are fewer
    several = {"algorithms": algorithms, "callbacks": callbacks, "loggers": loggers}
    for kind, given in several.items():
        if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
            raise TypeError(f"{kind}={given!r} should be a list, such as {kind}=[{given!r}].")
    voices = [one["actions"], one["strategies"], one["precisions"]]
    for kind, given in several.items():
        voices += _distinct([build(kind, item) for item in given])
    return Parts(voices, one["strategies"].obj, one["precisions"].obj, one["devices"].obj, reasons)


def that_leave_nothing(parts: Parts) -> Parts:
    """The same without the loggers that write something down: for tests of a run."""
    shown = [v for v in parts.voices if v.kind != "loggers" or getattr(v.obj, "shows_only", False)]
    return replace(parts, voices=shown)


def _distinct(voices: list[Voice]) -> list[Voice]:
    """The second of a name becomes ``name-2``."""
    names: set[str] = set()
    for voice in voices:
        name, number = voice.name, 1
        while voice.name in names:
            number += 1
            voice.name = f"{name}-{number}"
        names.add(voice.name)
    return voices


def _auto_strategy(devices: int) -> tuple[str, str]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    else:
        found = launching.current()
        world = max(found.world_size if found else 1, devices)
    if world == 1:
        return "single", f"single, because this is one process. {launching.hint(os.environ)}".rstrip()
    entry = _distributed_strategy(world)
    return f"{entry.dist}/{entry.name}", f"{entry.name}, because there are {world} processes"


def _distributed_strategy(world: int) -> catalog.Entry:
    """The declared default with the highest priority; imported only if there are several to choose from."""
    candidates = catalog.defaults(_ROLE)
    if not candidates:
        raise PluginError(
            f"There are {world} processes, and no installed strategy that runs on several. Type: "
            f"pip install 'hocket[{catalog.extra_of('defaults', _ROLE)}]', or pass strategy='single' for independent runs."
        )
    if len(candidates) == 1:
        return candidates[0]
    priorities: dict[catalog.Entry, float] = {}
    for entry in candidates:
        try:
            priorities[entry] = getattr(entry.load(), "priority", 0)
        except BrokenPluginError as error:
            warnings.warn(
                f"strategy='auto' skips the strategy '{entry.name}' of {entry.dist} {entry.version}: {said(error)}. "
                f"HOCKET_DISABLE_PLUGINS=dist:{entry.dist} leaves it out.",
                stacklevel=5,
            )
    best = [entry for entry, priority in priorities.items() if priority == max(priorities.values())]
    if len(best) != 1:
        choices = " or ".join(f"strategy='{entry.dist}/{entry.name}'" for entry in best or candidates)
        raise AmbiguousPluginError(
            f"There are {world} processes, and several distributions declare the strategy for that. Pass {choices}."
        )
    return best[0]


def _check_devices(given: Any) -> int:
    """Processes on this machine; 1 if nothing was said."""
    if given is None:
        return 1
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(
            f"devices={given!r} is not a number of devices; give a positive int, such as 2, or None for what was started."
        )
    return given


def _auto_device() -> tuple[Device, str]:
    """The device with the highest priority among those available here; one that cannot say is skipped, with a warning."""
    best: tuple[float, str, Device] | None = None
    for entry in catalog.choices("devices"):
        try:
            device: Device = entry.load()()
            if device.available() and (best is None or device.priority > best[0]):
                best = device.priority, entry.name, device
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            warnings.warn(
                f"device='auto' skips the device '{entry.name}' of {entry.dist} {entry.version}: {said(error)}. Type `hocket "
                f"plugins doctor` for more; HOCKET_DISABLE_PLUGINS=dist:{entry.dist} leaves it out.",
                stacklevel=4,
            )
    if best is None:
        raise PluginError("No installed device is available here. Pass device=, such as device='cpu'.")
    return best[2], f"{best[1]}, the best of those available here"


def check_model(model: nn.Module, device: Any, materializes: bool = False) -> None:
    """Refuse a model that cannot be moved to where it should be trained, naming the parameter. Raises TypeError, ValueError."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is {type(model).__name__}; give a torch.nn.Module or a hocket.Task.")
    places: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        places.setdefault(tensor.device, name)
    kind = type(model).__name__
    meta = torch.device("meta")
    if materializes:
        places.pop(meta, None)
    if meta in places:
        raise ValueError(
            f"{kind}.{places[meta]} is on the meta device and has no values. Give it some first: "
            "model.to_empty(device='cpu'), then initialise or load the weights."
        )
    if len(places) > 1:
        found = ", ".join(f"{kind}.{name} on {place}" for place, name in places.items())
        raise ValueError(f"The model is spread over devices: {found}. Move it to one: model.to('cpu').")
    if device not in (None, "auto") and isinstance(device, str):
        for place, name in places.items():
            if place.type not in ("cpu", device):
                raise ValueError(
                    f"{kind}.{name} is on {place}, but the Trainer was given device='{device}'. Pass device='{place.type}', "
                    f"or move the model first: model.to('{device}')."
                )


def move(task: Any, device: torch.device) -> Any:
    """The task on the device, but for what is on the meta device and has no values to move."""
    if any(tensor.is_meta for tensor in [*task.parameters(), *task.buffers()]):
        return task._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return task.to(device)


def describe(model: nn.Module) -> str:
    """Class and size."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {parameters:,} parameters"


def check_microbatch(given: Any, strategy: StrategyLike) -> int | None:
    """Samples per microbatch to begin with."""
    if given == "auto" and Need.FULL_PARAMETERS not in strategy.offers:
        raise ValueError(
            f"microbatch='auto' lets each rank try alone what fits, which it cannot under {type(strategy).__name__}: a forward "
            "pass needs the other ranks, which would wait for one that runs out of memory. Give a number, such as microbatch=8."
        )
    if given is None or given == "auto":
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"microbatch={given!r} is not a number of samples; give a positive int, 'auto' or None.")
    return given


def check_clipping(given: Any) -> tuple[Any, float] | None:
    """Kind and threshold of gradient clipping."""
    if given is None:
        return None
    kind, threshold = given if isinstance(given, tuple | list) and len(given) == 2 else ("norm", given)
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if kind not in ("norm", "value", "adaptive") or not number or not threshold > 0:
        raise ValueError(
            f"clip_gradients={given!r} is neither a positive norm, such as 1.0, nor a kind and a threshold, such as "
            "('value', 0.5) or ('adaptive', 0.01)."
        )
    return kind, float(threshold)


def check_reduction(given: Any) -> Literal["mean", "sum"] | None:
    """What losses are."""
    if given not in (None, "mean", "sum"):
        raise ValueError(f"loss_reduction={given!r} is neither 'mean' nor 'sum'; None for what the loss function says.")
    return given  # type: ignore[no-any-return]  # just checked


def hyperparameters(arguments: Mapping[str, Any], voices: Sequence[Voice]) -> dict[str, Any]:
    """The Trainer's arguments and the attached plug-ins, as JSON-like values; what is neither is named by its class."""
    simple = {name: plain(value) for name, value in arguments.items() if name not in _DATA}
    attached: dict[str, Any] = {}
    for voice in voices:
        attached.setdefault(voice.kind, {})[voice.name] = plain(voice.config)
    return {**simple, **attached}


_DATA = {"train_data", "eval_data", "algorithms", "callbacks", "loggers", "strategy", "precision", "actions"}


def plain(value: Any) -> Any:
    """JSON-like values as they are, all else as the name of its class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def prepare_deterministic(device: Device) -> None:
    """Before a GPU is used: torch 2.9 runs cuBLAS deterministically only under an environment variable, which this sets.

    Raises RuntimeError where it is too late for that.
    """
    known, name = (":4096:8", ":16:8"), "CUBLAS_WORKSPACE_CONFIG"
    if (
        not isinstance(device, CUDA)
        or torch.version.hip
        or TorchVersion(torch.__version__) >= "2.10"
        or os.environ.get(name) in known
    ):
        return
    if name in os.environ or torch.cuda.is_initialized():
        raise RuntimeError(
            f"deterministic=True on a GPU needs {name}={known[0]} with torch {torch.__version__} when the process starts, "
            f"and it is {os.environ.get(name, 'not set')}. Type: {name}={known[0]} python …, or upgrade torch to 2.10."
        )
    os.environ[name] = known[0]


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Only deterministic kernels inside; torch raises where an operation has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
