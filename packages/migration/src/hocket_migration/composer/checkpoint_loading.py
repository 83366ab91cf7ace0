"""Load checkpoints: those of mosaicml, and those of this package. Nothing that a file names is executed."""

from __future__ import annotations

import ast
import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hocket
from hocket.basics.run_folder import is_url
from hocket.errors import MissingFile, WrongValue
from hocket.help import warn
from hocket_checkpoints import CheckpointError, pickles
from hocket_migration import files
from hocket_migration.composer import algorithms, data_position, weight_names
from hocket_migration.composer.checkpoint_saving import named
from hocket_migration.composer.core.event import Event
from hocket_migration.composer.task import ComposerTask


@dataclass
class Loaded:
    """What ``load_path`` names.

    ``folder``: a checkpoint of hocket's; ``tree``: the content of a file, of mosaicml or of `save`.
    """

    path: Path
    folder: Path | None = None
    tree: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, Any]:
        """mosaicml's ``state``."""
        found: dict[str, Any] = self.tree.get("state", {})
        return found

    @property
    def timestamp(self) -> dict[str, Any] | None:
        """The position of the run; None for weights alone."""
        found: dict[str, Any] | None = self.state.get("timestamp")
        return None if found is None else dict(found.get("Timestamp", found))

    @property
    def schedulers(self) -> list[Mapping[str, Any]]:
        """The states of the schedulers; of several of one class, mosaicml saves the last."""
        return list(self.state.get("schedulers", {}).values())


def find(path: str | Path | None) -> Loaded | None:
    """Read what ``load_path`` names. Raises FileNotFoundError, and ValueError for what is no checkpoint."""
    if path is None:
        return None
    if is_url(path):
        return _remote(str(path).replace("{rank}", "0"))
    found = Path(os.path.expandvars(str(path).replace("{rank}", "0"))).expanduser()
    if not found.exists():
        raise MissingFile(f"load_path={str(path)!r} does not exist.")
    if found.is_dir():
        return Loaded(found, folder=found.resolve())
    return _loaded(found, found)


def _remote(url: str) -> Loaded:
    """Read a file by its URL. Raises ValueError for a folder, such as a checkpoint of hocket's."""
    try:
        file = files.opened(url)
    except IsADirectoryError:
        file = None
    except FileNotFoundError:
        file = None
    if file is None:
        raise MissingFile(
            f"load_path={url!r} is not a file. A checkpoint of hocket's is a folder: write hocket={{'resume': {url!r}}}."
        )
    return _loaded(Path(url), file)


def _loaded(path: Path, file: Any) -> Loaded:
    tree = _read(file, path)
    if not isinstance(tree, dict) or "state" not in tree:
        raise WrongValue(f"load_path={str(path)!r} is not a checkpoint of Composer's: it has no 'state'.")
    return Loaded(path, tree=tree)


def _read(file: Any, path: Path) -> Any:
    allowed: list[Any] = [datetime.timedelta, torch.torch_version.TorchVersion, *_NUMPY]
    try:
        return pickles.load(file, allowed)
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WrongValue(f"load_path={str(path)!r} is not read: {reason.rstrip('. ')}.") from None
    except Exception as error:
        raise WrongValue(
            f"load_path={str(path)!r} has objects of a class that is not loaded for safety, or is damaged: "
            f"{pickles.reason(error)}. If you trust the file, name the class with torch.serialization.add_safe_globals([…]) "
            "first."
        ) from error


def _reconstruct(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    """Return an array without elements, whatever shape a file asks for: its state, which follows, brings as many bytes."""
    return np.ndarray((0,))


#: What random numbers of NumPy 1 and 2 are pickled with.
_NUMPY: list[Any] = [
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]

#: The algorithms that changed the model: a checkpoint of theirs fits only a model that was changed.
_SURGERY = (
    "Alibi", "BlurPool", "Factorize", "GatedLinearUnits", "GhostBatchNorm", "GyroDropout", "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm", "SqueezeExcite", "StochasticDepth", "WeightStandardization",
)  # fmt: skip


def required_algorithms(loaded: Loaded | None, given: Sequence[Any], exclude: Sequence[str] | None) -> list[Any]:
    """Return algorithms that changed the model of a checkpoint and were not given, as mosaicml applies them too.

    Raises ValueError if the arguments of one are not known.
    """
    if loaded is None:
        return []
    there = {type(each).__name__ for each in given}
    missing = []
    for name, about in loaded.state.get("algorithms", []):
        if name not in _SURGERY or _OURS.get(name, name) in there or name in (exclude or ()):
            continue
        text = about.get("repr", "")
        try:
            call: Any = ast.parse(text, mode="eval").body
            arguments = {each.arg: _literal(each.value) for each in call.keywords}
            missing.append(getattr(algorithms, name)(**arguments))
        except (SyntaxError, ValueError, AttributeError, KeyError):
            raise WrongValue(
                f"The checkpoint {loaded.path} is of a model that {name} has changed, with arguments that are not known: "
                f"{text!r}. Pass algorithms=[{name}(…)], or load_exclude_algorithms=['{name}']."
            ) from None
        warn(f"Applied {text}, which the checkpoint {loaded.path} needs. Pass it as algorithms= too.")
    return missing


def _literal(node: ast.expr) -> Any:
    """Return the value of an argument: a literal, or an event."""
    if isinstance(node, ast.Attribute):
        return Event[node.attr]
    return ast.literal_eval(node)


#: hocket's names of classes that differ from Composer's.
_OURS = {"Alibi": "ALiBi"}


def resume_of(loaded: Loaded | None, weights_only: bool, ignore: Any, autoresume: bool) -> str | None:
    """Return hocket's ``resume``: a folder of its own, or "auto"."""
    if autoresume:
        return "auto"
    if loaded is None or loaded.folder is None or weights_only:
        return None
    if ignore:
        raise WrongValue(
            "load_ignore_keys= works with files of mosaicml. Call trainer.hocket.load_state_dict(tree, ignore=[…])."
        )
    return str(loaded.folder)


def load(
    trainer: hocket.Trainer, task: ComposerTask, loaded: Loaded, *, weights_only: bool, strict: bool, ignore: Any
) -> None:
    """Load a file into a new Trainer, or the weights of a folder.

    Raises:
        ValueError: weights, optimizer or data do not fit.
    """
    if loaded.folder is not None:
        if weights_only:
            trainer.load_weights(loaded.folder, strict=strict)
        return
    if "hocket" in loaded.tree and not weights_only and not ignore:
        trainer.load_state_dict(loaded.tree["hocket"])
        return
    if ignore:
        _ignore(loaded.tree, ignore)
    state = loaded.state
    here = trainer.model_state_dict(evaluated=False)
    model, averages = _trained_and_averages(state)
    weights = {weight_names.here(name, here): value for name, value in model.items() if not weight_names.derived(name)}
    if weights:
        trainer.load_weights(weights, strict=strict)
    if weights_only or loaded.timestamp is None:
        return
    _load_optimizer(trainer, task, state.get("optimizers", {}), here)
    tree = _with_position(trainer, loaded)
    _put_averages(trainer, tree, {weight_names.here(name, here): value for name, value in averages.items()})
    trainer.load_state_dict(tree)


def _trained_and_averages(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the weights of training, and the averages of EMA, if any: mosaicml saves either of them as the model."""
    model: Mapping[str, Any] = state.get("model", {})
    ema = dict(state.get("algorithms", [])).get("EMA", {})
    if not ema.get("ema_started"):
        return model, {}
    other = {**ema["ema_model"]["named_parameters_dict"], **ema["ema_model"]["named_buffers_dict"]}
    return ({**model, **other}, model) if ema["ema_weights_active"] else (model, other)


def _put_averages(trainer: hocket.Trainer, tree: dict[str, Any], averages: Mapping[str, Any]) -> None:
    own = tree["plugins"].get("algorithms", {}).get("ema")
    if own is None or not averages:
        return
    (ema,) = (each.obj for each in trainer.state.bus.attachments if (each.kind, each.name) == ("algorithms", "ema"))
    floating = {name: value for name, value in averages.items() if value.is_floating_point()}
    own |= {"averages": floating, "updated": int(tree["timestamp"][_FIELDS[ema.update_interval.unit.value]])}


#: The fields of a timestamp by unit.
_FIELDS = {"ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token"}


def _ignore(tree: dict[str, Any], ignore: Any) -> None:
    """Remove what ``load_ignore_keys`` names: globs of paths such as ``state/model/*``, or a function that changes the tree."""
    if callable(ignore):
        ignore(tree)
        return
    for glob in ignore:
        if not _remove(tree, "", glob):
            warn(f"load_ignore_keys: nothing in the checkpoint matches {glob!r}.")


def _remove(tree: dict[str, Any], prefix: str, glob: str) -> bool:
    found = False
    for key in list(tree):
        path = f"{prefix}{key}"
        if fnmatchcase(path, glob):
            del tree[key]
            found = True
        elif isinstance(tree[key], dict):
            found |= _remove(tree[key], f"{path}/", glob)
    return found


def _load_optimizer(
    trainer: hocket.Trainer, task: ComposerTask, saved: Mapping[str, Any], here: Mapping[str, Any]
) -> None:
    if not saved or not trainer.state.optimizers:
        return
    optimizer = trainer.state.optimizers[0]
    kind = type(optimizer).__name__
    if "SAMOptimizer" in saved:
        warn(f"mosaicml's checkpoints of runs with SAM do not have the state of {kind}, so it begins anew.")
        return
    if kind not in saved:
        raise WrongValue(
            f"The checkpoint has the state of {', '.join(saved)}, and the optimizer is {kind}. Give the same optimizer, or "
            "load_ignore_keys=['state/optimizers'] to begin with a new one."
        )
    if hocket.Need.FULL_PARAMETERS not in trainer.state.strategy.offers:
        raise WrongValue(
            "The optimizer's state of mosaicml cannot be loaded into shards. Continue in one process or with ddp."
        )
    own = {id(parameter): name for name, parameter in task.model.named_parameters()}
    order = [own[id(p)] for group in optimizer.param_groups for p in group["params"]]
    states = {weight_names.here(name, here): state for name, state in saved[kind]["state"].items()}
    if unknown := [name for name in states if name not in order]:
        raise WrongValue(f"The checkpoint has the optimizer's state of {unknown[0]}, which is not in the optimizer.")
    groups, tree = [], optimizer.state_dict()
    if len(saved[kind]["param_groups"]) != len(tree["param_groups"]):
        raise WrongValue(
            f"The checkpoint's optimizer has {len(saved[kind]['param_groups'])} parameter groups, and this one "
            f"{len(tree['param_groups'])}. Make it with the same groups."
        )
    for group, there in zip(tree["param_groups"], saved[kind]["param_groups"], strict=True):
        groups.append(
            {
                **group,
                **{key: value for key, value in there.items() if key in (*group, "initial_lr") and key != "params"},
            }
        )
    known = {order.index(name): state for name, state in states.items()}
    optimizer.load_state_dict({"state": known, "param_groups": groups})


def _with_position(trainer: hocket.Trainer, loaded: Loaded) -> dict[str, Any]:
    """Return the Trainer's state at the position of a checkpoint of mosaicml's, in its data too."""
    there = loaded.timestamp or {}
    fields = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
    now: dict[str, Any] = {name: int(there[name]) for name in fields}
    walls = {"seconds": "total_wct", "epoch_seconds": "epoch_wct", "batch_seconds": "batch_wct"}
    now |= {name: there[old].total_seconds() for name, old in walls.items()}
    data, epoch, batch = data_position.of(trainer, now, int(loaded.state.get("rank_zero_seed") or 0))
    if epoch > now["epoch"]:  # the checkpoint was taken after the last batch, and before the epoch was counted
        now |= {"epoch": epoch, "batch_in_epoch": batch, "sample_in_epoch": 0, "token_in_epoch": 0}
    tree = trainer.state_dict()
    tree["timestamp"] = now
    tree["previous"] = {**now, "batch": max(now["batch"] - 1, 0), "batch_in_epoch": max(now["batch_in_epoch"] - 1, 0)}
    tree["progress"] = dict.fromkeys(tree["progress"], now["batch"])
    for number, rank in enumerate(tree["ranks"]):
        rank["data"] = data
        if number < len(loaded.tree.get("rng", ())):
            rank["random"] |= _random(loaded.tree["rng"][number])
    return tree


def _random(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return mosaicml's random numbers of a rank, on the CPU, as hocket's checkpoints hold them."""
    version, words, gauss = saved["python"]
    name, array, position_, has_gauss, cached = saved["numpy"]
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "words": torch.from_numpy(np.asarray(array).astype(np.int64)),
            "position": int(position_),
            "gauss": float(cached) if has_gauss else None,
        },
        "torch": saved["torch"],
    }


def save(trainer: hocket.Trainer, task: ComposerTask, name: str, weights_only: bool) -> str:
    """Write the state into a file, and return its path."""
    path = named(name, trainer.state)
    tree = {} if weights_only else {"hocket": trainer.state_dict()}
    weights = trainer.model_state_dict(evaluated=False)
    if trainer.state.strategy.rank == 0:
        files.write({"state": {"model": weights, "run_name": trainer.state.run_name}, **tree}, path)
    return path
