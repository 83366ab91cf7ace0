"""Resolve the Trainer's arguments to the plug-ins of a run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hocket.basics import launch_environment
from hocket.basics.plugin_errors import AmbiguousPluginError, BrokenPluginError, PluginError, summarize
from hocket.devices import Device
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import PrecisionLike, StrategyLike
from hocket.hookspecs.attachment import Attachment
from hocket.plugins import registry
from hocket.plugins.building import build

if TYPE_CHECKING:
    from hocket.basics.types import PluginLike

#: The role that "auto" resolves if there are several processes.
_ROLE = "distributed-strategy"


@dataclass(frozen=True, slots=True)
class Parts:
    """The plug-ins of a run."""

    #: All plug-ins to attach to the bus.
    attachments: list[Attachment]
    strategy: StrategyLike
    precision: PrecisionLike
    device: Device
    #: The choices for ``"auto"``, with their reasons.
    reasons: Mapping[str, str]


def resolve(
    *,
    strategy: PluginLike,
    precision: PluginLike,
    device: PluginLike,
    actions: PluginLike = "default",
    algorithms: Sequence[PluginLike] = (),
    callbacks: Sequence[PluginLike] = (),
    loggers: Sequence[PluginLike] = (),
    devices: int | None = None,
) -> Parts:
    """Import and instantiate the plug-ins that the arguments name, and no others."""
    reasons: dict[str, str] = {}
    processes = _check_devices(devices)
    if strategy == "auto":
        strategy, reasons["strategy"] = _auto_strategy(processes)
    if device == "auto":
        device, reasons["device"] = _auto_device()
    one = {"strategies": strategy, "precisions": precision, "actions": actions, "devices": device}
    single = {kind: build(kind, given) for kind, given in one.items()}
    if processes > 1:
        if not single["strategies"].obj.distributed:
            raise WrongValue(
                f"«devices={devices}», but «strategy='{single['strategies'].name}'» trains in one process. Omit «strategy=» or "
                "devices=."
            )
        single["devices"].obj.torch_device(processes - 1)  # raises if there are fewer
    several = {"algorithms": algorithms, "callbacks": callbacks, "loggers": loggers}
    attachments = [single["actions"], single["strategies"], single["precisions"]]
    for kind, given in several.items():
        built = [build(kind, item) for item in given]
        _check_twice(built)
        for attachment, name in zip(built, registry.distinct([item.name for item in built]), strict=True):
            attachment.name = name
        attachments += built
    return Parts(attachments, single["strategies"].obj, single["precisions"].obj, single["devices"].obj, reasons)


def without_writing_loggers(parts: Parts) -> Parts:
    """Return the parts without loggers that write files, for ``fast_dev_run`` and ``overfit``."""
    kept = [attachment for attachment in parts.attachments if attachment.kind != "loggers" or shows_only(attachment)]
    return replace(parts, attachments=kept)


def shows_only(logger: Attachment) -> bool:
    """Whether a logger declares that it writes no files."""
    return getattr(logger.obj, "shows_only", False)


def _check_twice(attachments: Sequence[Attachment]) -> None:
    """Raise ValueError for two plug-ins that inherit one ``once``, and for two of a class with one file, or given alike."""
    seen: dict[object, str] = {}
    for attachment in attachments:
        name, cls, arguments = attachment.name, type(attachment.obj), _arguments(attachment)
        declaring = next((base for base in cls.__mro__ if "once" in vars(base)), cls)
        advice: dict[object, str] = {declaring: getattr(declaring, "once", "")}
        if arguments is not None and (attachment.dist or attachment.kind == "loggers"):
            file = {key: arguments[key] for key in _FILES if key in arguments}
            what = " and ".join(file) or "arguments"
            same = (
                f"Both have the same {what}, and would do or write the same. Remove one, or give them different {what}."
            )
            advice[cls, repr(file or arguments)] = same
        for key, write in advice.items():
            if write and (first := seen.get(key)):
                said = f"{name!r} twice" if first == name else f"{first!r} and {name!r}"
                raise WrongValue(f"{attachment.kind} has {said}. {write}")
        seen |= dict.fromkeys(advice, name)


#: Arguments that name the file that a plug-in writes.
_FILES = ("filename", "folder", "path")


def _arguments(attachment: Attachment) -> dict[str, Any] | None:
    """Return the arguments of a plug-in with the defaults of others, or None if they are unknown.

    An instance may only write to memory, where two are fine, so its arguments are compared only if it has a ``filename``. A
    class of the user's may count for itself.
    """
    parameters = inspect.signature(type(attachment.obj)).parameters
    if not attachment.instance:
        return {name: parameter.default for name, parameter in parameters.items()} | dict(attachment.arguments)
    known = "filename" in parameters and all(hasattr(attachment.obj, name) for name in parameters)
    return {name: getattr(attachment.obj, name) for name in parameters} if known else None


def _auto_strategy(devices: int) -> tuple[str, str]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    else:
        launched = launch_environment.current()
        world = max(launched.world_size if launched else 1, devices)
    if world == 1:
        return "single", f"single, because this is one process. {launch_environment.hint(os.environ)}".rstrip()
    entry = _distributed_strategy(world)
    return f"{entry.dist}/{entry.name}", f"{entry.name}, because there are {world} processes"


def _distributed_strategy(world: int) -> registry.Entry:
    """Return the declared default with the highest priority. Candidates are imported only if there are several."""
    candidates = registry.defaults(_ROLE)
    if not candidates:
        from hocket.help import installing

        raise PluginError(
            f"There are {world} processes, but no installed strategy supports several. Type: "
            f"{installing.command(str(registry.extra_of('defaults', _ROLE)))}, or train in one process: omit «devices=», "
            "and under a launcher pass «strategy='single'», for independent runs."
        )
    if len(candidates) == 1:
        return candidates[0]
    priorities: dict[registry.Entry, float] = {}
    for entry in candidates:
        try:
            priorities[entry] = getattr(entry.load(), "priority", 0)
        except BrokenPluginError as error:
            warn(
                f"«strategy='auto'» skips the strategy '{entry.name}' of {entry.dist} {entry.version}: {summarize(error)}. "
                f"Set HOCKET_DISABLE_PLUGINS=dist:{entry.dist} to disable it."
            )
    best = [entry for entry, priority in priorities.items() if priority == max(priorities.values())]
    if len(best) != 1:
        choices = " or ".join(f"strategy='{entry.dist}/{entry.name}'" for entry in best or candidates)
        raise AmbiguousPluginError(
            f"There are {world} processes, and several distributions declare a default strategy for them. Pass {choices}."
        )
    return best[0]


def _check_devices(given: object) -> int:
    """Return the number of processes on this machine; 1 if ``devices=`` was not given. Raises ValueError."""
    if given is None:
        return 1
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise WrongValue(
            f"«devices={given!r}» is not a number of devices; give a positive int, such as 2, or «None» to start no processes."
        )
    return given


def _auto_device() -> tuple[Device, str]:
    """Return the available device with the highest priority. A device that raises is skipped, with a warning."""
    best: tuple[float, str, Device] | None = None
    for entry in registry.choices("devices"):
        try:
            device: Device = entry.load()()
            if device.available() and (best is None or device.priority > best[0]):
                best = device.priority, entry.name, device
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            warn(
                f"«device='auto'» skips the device '{entry.name}' of {entry.dist} {entry.version}: {summarize(error)}. Type "
                f"`hocket plugins doctor` for details; set HOCKET_DISABLE_PLUGINS=dist:{entry.dist} to disable it."
            )
    if best is None:
        raise PluginError("No installed device is available here. Pass «device=», such as «device='cpu'».")
    return best[2], f"{best[1]}, the best of those available here"
