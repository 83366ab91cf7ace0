"""Checkpoints of custom loops, whose content the caller names; see `hocket.Runtime.save`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.basics import seeding
from hocket.basics.plain_data import decode, encode
from hocket.errors import CheckpointError, WrongType
from hocket.help import optional_packages, warn
from hocket.state.ranks import Ranks
from hocket_strategies.custom_loops import checks
from hocket_strategies.custom_loops.prepared import PreparedData, inner, tensors

if TYPE_CHECKING:
    from hocket_strategies.custom_loops.runtime import Runtime


_FORMAT = "hocket_checkpoints.storage.format"


def save(runtime: Runtime, path: Path, things: Mapping[str, Any]) -> None:
    """See `hocket.Runtime.save`."""
    tree = {name: encode(_state_of(runtime, thing, name), name, gather=False) for name, thing in things.items()}
    random = [encode(each) for each in runtime.all_gather(seeding.capture())]
    content = {"things": tree, "random": random, "precision": encode(runtime.precision.state_dict())}
    optional_packages.module(_FORMAT).write(
        path, content, {"kind": "runtime"}, Ranks(runtime.rank, runtime.world_size, runtime.all_gather)
    )


def load(runtime: Runtime, path: Path, things: Mapping[str, Any]) -> dict[str, Any]:
    """See `hocket.Runtime.load`."""
    checks.check_loaded(path, things)
    if not path.exists():
        raise CheckpointError(f"{path} is not a checkpoint: there is no such folder. Give one that runtime.save wrote.")
    saved = optional_packages.module(_FORMAT).read(path)
    kept = {name: decode(value) for name, value in saved["things"].items()}
    if missing := sorted(things.keys() - kept.keys()):
        raise CheckpointError(
            f"{path} does not contain {', '.join(missing)}. It contains: {', '.join(sorted(kept)) or 'nothing'}. Write "
            f"runtime.load({str(path)!r}{_named(things.keys() & kept.keys())}); or save it there as well: "
            f"runtime.save({str(path)!r}{_named(things)})."
        )
    if not things and (states := [name for name, each in kept.items() if any(True for _ in tensors(each))]):
        warn(
            f"load changed no object, and returned the state of {', '.join(states)} as values. Write runtime.load("
            f"{str(path)!r}{_named(states)}) to load into what setup returned."
        )
    # Models first: sharded optimizers read their parameters.
    for name, thing in sorted(things.items(), key=lambda item: not isinstance(item[1], nn.Module)):
        state = kept.pop(name)
        if isinstance(thing, nn.Module):
            runtime.load_model_state(thing, state)
        elif isinstance(thing, torch.optim.Optimizer):
            runtime.bus.load_optimizer_state(runtime.model_of(thing), thing, state)
        else:
            thing.load_state_dict(state)
    runtime.precision.load_state_dict(decode(saved["precision"]))
    if runtime.rank < len(saved["random"]):
        seeding.restore(decode(saved["random"][runtime.rank]))
    return kept


def _named(things: Iterable[str]) -> str:
    return "".join(f", {name}={name}" for name in sorted(things))


def _state_of(runtime: Runtime, thing: Any, name: str) -> Any:
    if isinstance(thing, nn.Module):
        return dict(runtime.bus.model_shards(inner(thing)))
    if isinstance(thing, torch.optim.Optimizer):
        return runtime.bus.optimizer_shards(runtime.model_of(thing), thing)
    if isinstance(thing, PreparedData):
        raise WrongType(
            f"save was given data ({name}=…), whose position a Runtime does not keep. Save at the end of an epoch, with "
            "numbers such as epoch=epoch, and begin with the next one after load. hocket.Trainer resumes within an epoch."
        )
    return thing.state_dict() if hasattr(thing, "state_dict") else thing
