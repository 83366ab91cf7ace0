"""``.ckpt`` files in Lightning's format: written for ``load_from_checkpoint`` and callbacks, read to continue a run."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket.basics import safe_files
from hocket.errors import WrongValue
from hocket.help import warn
from hocket_checkpoints import CheckpointError, pickles
from hocket_migration import files
from hocket_migration.lightning import callbacks
from hocket_migration.lightning.arguments import REFUSED_PATHS
from hocket_migration.lightning.installed_lightning import overrides

if TYPE_CHECKING:
    from hocket_migration.lightning.trainer_view import TrainerView


def save(trainer: TrainerView, path: Any, weights_only: bool) -> None:
    """Write a ``.ckpt`` file, by path or URL. All ranks call it; rank 0 writes.

    Raises CheckpointError under strategies that shard weights.
    """
    saved = content(trainer, weights_only)
    if trainer.is_global_zero:
        files.write(saved, path)
    if not trainer.interrupted:  # after an exception other ranks may not come
        trainer.strategy.barrier("save_checkpoint")


def sharded(trainer: TrainerView) -> CheckpointError:
    """Return the error of a ``.ckpt`` file under a strategy that shards weights."""
    assert trainer.run_state is not None
    return CheckpointError(
        f"A .ckpt file holds the full state, and strategy {type(trainer.run_state.strategy).__name__} shards it. Write "
        "checkpoints of hocket, which any number of ranks resumes from: hocket={'checkpoints': 'runs/a'}, with "
        "enable_checkpointing=False, and no ModelCheckpoint."
    )


def check_writers(trainer: TrainerView, given: Mapping[str, Any]) -> None:
    """Omit the callback that writes ``.ckpt`` files by default, for a strategy that shards.

    Args:
        given: the arguments of the Trainer.

    Raises:
        CheckpointError: such files were asked for.
    """
    kinds = trainer.framework.callbacks.Checkpoint
    writers = [each for each in trainer.callbacks if isinstance(each, kinds)]
    if not writers:
        return
    listed = callbacks.checked(given["callbacks"], trainer.framework)
    if (
        given["enable_checkpointing"]
        or overrides(trainer.lightning_module, "configure_callbacks", trainer.framework.LightningModule)
        or any(each is writer for each in listed for writer in writers)
    ):
        raise sharded(trainer)
    trainer.callbacks = [each for each in trainer.callbacks if each not in writers]
    trainer.print(
        "No .ckpt files are written: the strategy shards the weights. Write hocket={'checkpoints': 'runs/a'}."
    )


def content(trainer: TrainerView, weights_only: bool) -> dict[str, Any]:
    """Return what a ``.ckpt`` file holds."""
    import hocket

    module, run = trainer.lightning_module, trainer.run_state
    if module is None:
        raise CheckpointError("save_checkpoint was called before the Trainer has a module. Call fit or validate first.")
    if run is not None and hocket.Need.FULL_PARAMETERS not in run.strategy.offers:
        raise sharded(trainer)
    saved: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": trainer.framework.__version__,
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": _loops(trainer)},
    }
    if not weights_only:
        saved["callbacks"] = {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())}
        saved["optimizer_states"] = [each.state_dict() for each in trainer.optimizers]
        saved["lr_schedulers"] = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
    for obj in (module, trainer.datamodule):
        if obj is not None and obj.hparams:
            if hasattr(obj, "_hparams_name"):
                saved[obj.CHECKPOINT_HYPER_PARAMS_NAME] = obj._hparams_name
            saved[obj.CHECKPOINT_HYPER_PARAMS_KEY] = dict(obj.hparams)
    if trainer.datamodule is not None and (state := trainer.datamodule.state_dict()):
        saved[type(trainer.datamodule).__qualname__] = state
    if not weights_only:
        trainer.hooks.callbacks("on_save_checkpoint", saved)
    trainer.hooks.module("on_save_checkpoint", saved)
    return saved


def _counter(ready: int, processed: int, completed: int, earlier: int = 0) -> dict[str, Any]:
    """Return a counter of the current loop, and of all, of which so many were counted earlier."""

    def tracker(before: int) -> dict[str, int]:
        return {
            "ready": before + ready,
            "completed": before + completed,
            "started": before + ready,
            "processed": before + processed,
        }

    return {"total": tracker(earlier), "current": tracker(0)}


def _loops(trainer: TrainerView) -> dict[str, Any]:
    batch, epoch = trainer.batch_idx + 1, trainer.current_epoch
    steps, earlier = trainer.global_step, trainer.total_batch_idx - trainer.batch_idx
    nothing = _counter(0, 0, 0)
    task = getattr(trainer.run_state, "task", None)
    counted, processed = bool(getattr(task, "_counted", False)), batch - bool(getattr(task, "_begun", False))
    # Lightning counts a batch after the validation that follows it.
    stepped = trainer.batches_that_stepped - int(trainer.validating and counted)
    optimizer = {"total": {"ready": steps, "completed": steps}, "current": {"ready": batch, "completed": batch}}
    zeroed = {name: {**each, "started": each["ready"]} for name, each in optimizer.items()}
    return {
        "state_dict": {},
        "epoch_progress": _counter(epoch + trainer.epoch_begun, epoch + trainer.epoch_processed, epoch),
        "epoch_loop.state_dict": {"_batches_that_stepped": stepped},
        "epoch_loop.batch_progress": {
            **_counter(batch, processed, processed - trainer.batch_ending, earlier),
            "is_last_batch": trainer.is_known_last_batch,
        },
        "epoch_loop.scheduler_progress": {"total": optimizer["total"], "current": optimizer["current"]},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": optimizer, "zero_grad": zeroed}},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": optimizer,
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**nothing, "is_last_batch": False},
    }


def named(trainer: TrainerView, path: Any, weights_only: bool | None) -> dict[str, Any] | None:
    """Return the checkpoint that ``ckpt_path`` names; None without one."""
    trainer.keep(ckpt_path=None)
    if path is None:
        return None
    if path in REFUSED_PATHS:
        raise WrongValue(f"ckpt_path={path!r} has no counterpart in hocket. Give the path of a .ckpt file.")
    if path in ("best", "last"):
        writer = trainer.checkpoint_callback
        found = getattr(writer, f"{path}_model_path", "")
        if not found and path == "last" and writer is not None:
            last = [files.named_by(writer._fs, each) for each in writer._find_last_checkpoints(trainer)]
            found = max(last, key=files.modified, default="")
        if not found and path == "last":
            warn("ckpt_path='last': there is no checkpoint yet, so none is loaded.")
            return None
        if not found:
            raise WrongValue(
                f"ckpt_path={path!r}: no ModelCheckpoint of this Trainer has written one. Give the path of a .ckpt file."
            )
        path = found
    trainer.keep(ckpt_path=os.fspath(path))
    return read(path, weights_only)


def read(path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Return what a ``.ckpt`` file holds, on the CPU.

    Args:
        weights_only: None or True for tensors and plain data only; False to unpickle any object.

    Raises:
        CheckpointError: there is no such file, it was not written by Lightning, or it holds other objects.
    """
    try:
        file = files.opened(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"There is no checkpoint file {str(path)!r}. Give ckpt_path= the path of a .ckpt file."
        ) from error
    try:
        if weights_only is False:
            with safe_files.opened(file) if isinstance(file, Path) else file as opened:
                saved = torch.load(opened, map_location="cpu", weights_only=False)
        else:
            saved = pickles.load(file)
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{str(path)!r} is not read: {reason.rstrip('. ')}.") from None
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {type(error).__name__}: {pickles.reason(error)}. "
            + (
                "It may hold objects, such as hyperparameters: if you trust its source, write fit(…, weights_only=False)."
                if zipfile.is_zipfile(file)
                else "It is not a file that torch.save wrote. Give ckpt_path= the path of a .ckpt file."
            )
        ) from error
    if not isinstance(saved, Mapping) or "state_dict" not in saved:
        raise CheckpointError(
            f"{str(path)!r} is not a checkpoint of Lightning: it has no state_dict. If it holds weights only, write "
            "module.load_state_dict(torch.load(path)), and omit ckpt_path=."
        )
    return dict(saved)


def restore_weights(trainer: TrainerView, saved: Mapping[str, Any]) -> None:
    """Load the weights, after ``on_load_checkpoint``, into the module."""
    module = trainer.lightning_module
    trainer.hooks.module("on_load_checkpoint", saved)
    module.load_state_dict(saved["state_dict"], strict=module.strict_loading)
    datamodule = trainer.datamodule
    if datamodule is not None and (name := type(datamodule).__qualname__) in saved:
        datamodule.load_state_dict(saved[name])


def restore_callbacks(trainer: TrainerView, saved: Mapping[str, Any]) -> None:
    """Load the callbacks' state."""
    trainer.hooks.callbacks("on_load_checkpoint", saved)
    states = saved.get("callbacks", {})
    for callback in trainer.callbacks:
        state = states.get(callback.state_key, states.get(type(callback)))
        if state is not None:
            callback.load_state_dict(state)


def restore_training(trainer: TrainerView, saved: Mapping[str, Any]) -> None:
    """Load optimizers and schedulers, and set the counters of hocket's run.

    Raises CheckpointError for a checkpoint of weights only, or of other optimizers.
    """
    run = trainer.run_state
    assert run is not None
    if "optimizer_states" not in saved:
        raise CheckpointError(
            "The checkpoint holds weights only, so training cannot be continued. Load them by load_from_checkpoint, and fit "
            "without ckpt_path=."
        )
    for what, objects, states in (
        ("optimizers", trainer.optimizers, saved["optimizer_states"]),
        ("schedulers", [each.scheduler for each in trainer.lr_scheduler_configs], saved["lr_schedulers"]),
    ):
        if what == "schedulers" and not objects and trainer._of_kind("StochasticWeightAveraging"):
            continue  # the callback replaces them, and has the state of its own
        if len(objects) != len(states):
            raise CheckpointError(
                f"The checkpoint has {len(states)} {what}, and configure_optimizers() of "
                f"{type(trainer.lightning_module).__name__} returned {len(objects)}. Return as many."
            )
        for each, state in zip(objects, states, strict=True):
            each.load_state_dict(state)
    loop = saved.get("loops", {}).get("fit_loop")
    trainer.global_step = saved["global_step"]
    epoch, batch, total = saved["epoch"], 0, saved["global_step"]
    trainer.batches_that_stepped = saved["global_step"]
    if loop is not None:
        epochs, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
        epoch, batch, total = epochs["completed"], batches["current"]["processed"], batches["total"]["processed"]
        trainer.batches_that_stepped = loop["epoch_loop.state_dict"].get("_batches_that_stepped", total)
        # A file from `on_train_batch_end` or a validation does not count the batch yet.
        if trainer.lightning_module.automatic_optimization:
            trainer.batches_that_stepped = max(trainer.batches_that_stepped, saved["global_step"])
        elif batches["current"]["completed"] < batches["current"]["processed"]:
            trainer.batches_that_stepped += 1
        in_last = batches.get("is_last_batch") and batch == batches["current"]["ready"]
        ended = in_last or epochs["processed"] > epochs["completed"]
        if epochs["ready"] > epochs["completed"] and ended:
            epoch, batch = epoch + 1, 0
        elif epochs["ready"] == epochs["completed"]:
            batch = 0
    else:
        epoch += 1
    if trainer.max_epochs is not None and -1 != trainer.max_epochs < epoch:
        raise CheckpointError(
            f"The checkpoint is of epoch {epoch}, and Trainer(max_epochs={trainer.max_epochs}) ends before it. Write "
            f"max_epochs={epoch + 1} or more."
        )
    window = trainer.accumulate_grad_batches
    trainer.current_epoch, trainer.total_batch_idx = epoch, total - 1 - batch
    trainer.batches_to_skip = batch // window
    done = -(-total // window) - trainer.batches_to_skip
    run.timestamp.epoch, run.timestamp.batch = epoch, done
    run.previous.become(run.timestamp)
    run.progress.load_state_dict(dict.fromkeys(run.progress.state_dict(), done))
