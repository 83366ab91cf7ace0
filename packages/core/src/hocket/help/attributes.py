"""Methods and attributes of other libraries: what to write here instead."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.help import names

_SAVE = "trainer.model_state_dict() for the weights, as in torch.save(trainer.model_state_dict(), 'model.pt'); pass "\
    "checkpoints='runs/a' to the Trainer to write checkpoints"  # fmt: skip
#: What to write instead, by the class and the names that other libraries use.
_INSTEAD: Mapping[str, Mapping[str, str]] = {
    "Trainer": {
        "train run start train_model fine_tune fit_one_cycle learn train_loop": "trainer.fit()",
        "test validate eval evaluation_loop val score validation": "trainer.evaluate(data), or trainer.evaluate({{'test': data}}) "
        "for results named test/…",
        "predict_proba transform infer inference get_preds __call__ forward": "trainer.predict(data), which returns the outputs of "
        "each batch; apply softmax to them",
        "save save_model save_checkpoint save_pretrained save_weights save_state export export_for_inference": _SAVE,
        "load load_model load_checkpoint load_state load_from_checkpoint from_pretrained restore": "trainer.load_weights('model.pt') "
        "for weights, and hocket.Trainer(…, resume='runs/a/ep3-ba18') to continue a run",
        "model module network net lightning_module unwrap_model get_model": "trainer.state.model",
        "optimizer": "trainer.state.optimizers[0]",
        "optimizers": "trainer.state.optimizers",
        "lr_scheduler scheduler schedulers lr_schedulers lr_scheduler_configs": "trainer.state.schedules; the rates themselves are "
        "in trainer.state.optimizers[0].param_groups",
        "current_epoch epoch": "trainer.state.timestamp.epoch",
        "global_step step num_steps batch_idx": "trainer.state.timestamp.batch",
        "device": "trainer.state.device",
        "callback_metrics logged_metrics metrics progress_bar_metrics log_history history state_metrics": "trainer.state.metrics, or "
        "the result: result = trainer.fit(), then result.metrics",
        "logger loggers log log_metrics": "loggers=['progress', 'jsonl'] in the Trainer, and state.log({{'name': value}}) in a "
        "callback or algorithm",
        "callbacks add_callback remove_callback": "callbacks=[…] in the Trainer",
        "train_dataloader train_loader train_data": "trainer.state.train_data",
        "val_dataloaders eval_dataloader eval_data": "trainer.state.eval_sets",
        "loss": "trainer.state.loss",
        "push_to_hub create_model_card": "trainer.model_state_dict() for the weights, and upload them with huggingface_hub",
        "compile": "compile=True in the Trainer; loss=, optimizer= and metrics= are its arguments too",
        "summary summarize": "print(trainer.plan())",
        "should_stop stop stop_training": "state.request(hocket.Decision.STOP, reason='…') in a callback",
        "is_global_zero is_main_process is_world_process_zero": "trainer.state.strategy.rank == 0",
        "global_rank local_rank rank world_size num_devices": "trainer.state.strategy.rank and trainer.state.strategy.world_size",
        "tune lr_find auto_lr_find": "one fit for each learning rate; a Trainer is made quickly",
        "barrier backward clip_gradients": "hocket.Runtime for a loop of your own",
        "default_root_dir log_dir run_dir": "trainer.state.run_folder",
        "checkpoint_callback best_model_path": "result.checkpoints of result = trainer.fit()",
        "parameters named_parameters train_mode": "trainer.state.model.parameters()",
        "hyperparameter_search": "one Trainer for each configuration",
        "create_optimizer get_train_dataloader compute_loss training_step": "optimizer=, train_data= and loss= of the Trainer, or a "
        "hocket.Task that defines loss(outputs, batch)",
    },
    "State": {
        "epoch current_epoch": "state.timestamp.epoch",
        "step_number global_step batch_idx batch_index": "state.timestamp.batch",
        "trainer": "state itself: it has model, optimizers, timestamp, metrics, and request(…) for the loop",
        "optimizer": "state.optimizers[0]",
        "logger log_dict": "state.log({{'name': value}})",
        "callback_metrics logged_metrics": "state.metrics",
        "stop should_stop stop_training": "state.request(hocket.Decision.STOP, reason='…')",
        "output predictions logits y_pred": "state.outputs",
        "train_dataloader dataloader": "state.train_data",
    },
    "Runtime": {
        "prepare": "model, optimizer = runtime.setup(model, optimizer) and data = runtime.setup_data(loader)",
        "setup_dataloaders prepare_data_loader setup_data_loader": "runtime.setup_data(loader)",
        "setup_module setup_model prepare_model": "runtime.setup(model)",
        "setup_optimizers prepare_optimizer": "runtime.setup(model, optimizer)",
        "launch": "hocket launch train.py, or devices=2 in the Runtime",
        "autocast": "runtime.setup(model): the returned model computes in the precision",
        "accumulating no_backward_sync no_sync": "with runtime.accumulate(model, last=…):",
        "clip_grad_norm_ clip_grad_norm clip_grad_value_": "runtime.clip_gradients(model, optimizer, norm=1.0)",
        "gather gather_for_metrics": "runtime.all_gather(value)",
        "reduce": "runtime.all_reduce(tensor, 'mean')",
        "wait_for_everyone": "runtime.barrier()",
        "is_main_process is_global_zero is_local_main_process": "runtime.rank == 0",
        "process_index global_rank local_rank": "runtime.rank",
        "num_processes": "runtime.world_size",
        "save_state save_model": "runtime.save('runs/a', model=model, optimizer=optimizer)",
        "load_state": "runtime.load('runs/a', model=model, optimizer=optimizer)",
        "unwrap_model": "model.module, of the model that runtime.setup returned",
        "zero_grad": "runtime.step(optimizer), which also sets gradients to None",
        "log init_trackers": "a logger of your own; loggers= belong to hocket.Trainer",
        "seed_everything": "hocket.Runtime(seed=17)",
        "fit train": "hocket.Trainer for a ready-made loop; Runtime is for a loop of your own",
    },
    "Result": {
        "history loss losses log_history": "result.metrics for the latest evaluation; loggers=['jsonl'] writes all values",
        "epoch epochs": "result.timestamp.epoch",
        "best_model_path checkpoint checkpoint_path": "result.checkpoints",
    },
    "hocket": {
        "LightningModule Module Model Learner BaseModel ComposerModel TrainModule": "hocket.Task, a torch.nn.Module with "
        "forward(batch) and loss(outputs, batch)",
        "LightningDataModule DataModule DataLoaders DataBlock Dataset DataLoader": "torch.utils.data.DataLoader, as "
        "hocket.Trainer(train_data=loader, eval_data=loader)",
        "TrainingArguments Config Arguments TrainerConfig": "the arguments of hocket.Trainer",
        "ModelCheckpoint Checkpoint CheckpointCallback CheckpointSaver": "hocket.Checkpoints, as hocket.Trainer(checkpoints='runs/a')",
        "EarlyStopping": "callbacks=['early-stopping'], or hocket.callbacks.EarlyStopping",
        "seed_everything set_seed": "hocket.Trainer(seed=17)",
        "Fabric Accelerator": "hocket.Runtime",
        "Engine": "hocket.Trainer, or hocket.Runtime for a loop of your own",
        "TrainerCallback": "hocket.Callback",
        "train fit": "hocket.Trainer(…).fit()",
        "Metric": "an object with update, compute and reset, or torchmetrics",
    },
}  # fmt: skip


def missing(owner: str, name: str, obj: Any) -> str:
    """Return the message for an attribute that does not exist: what other libraries mean by it, or a similar name."""
    there = [each for each in dir(obj) if each[0] != "_"]
    found = instead(owner, name, there)
    return f"{owner} has no {name!r}; it has {', '.join(there)}. {found}".rstrip()


def instead(owner: str, name: str, there: Iterable[str]) -> str:
    """Return what to write instead of a name of another library, or a similar name, or empty."""
    text = next((text for others, text in _INSTEAD.get(owner, {}).items() if name in others.split()), None)
    if text is not None:
        return f"Write {text.format()}."
    near = difflib.get_close_matches(name, there, 1, 0.6)
    return f"Did you mean '{near[0]}'?" if near else ""


class Named(enum.EnumMeta):
    """The metaclass of enumerations that suggest a member for a name that does not exist."""

    def __getattr__(cls, name: str) -> Any:
        members = type.__getattribute__(cls, "__dict__").get("_member_map_", {})
        if name in members:
            return members[name]
        raise AttributeError(name if name.startswith("_") else unknown_member(cls, name))

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise KeyError(unknown_member(cls, str(name))) from None


def unknown_member(cls: Any, name: str) -> str:
    """Return the message for a member of an enumeration that does not exist."""
    members = list(cls.__members__)
    wanted = name.upper()
    known = names.hook(name.lower()) if cls.__name__ == "Event" else None
    near = [known.upper()] if known and known.upper() in members else difflib.get_close_matches(wanted, members, 1, 0.5)
    hint = f"Write {cls.__name__}.{near[0]}. " if near else f"Write {cls.__name__}.{members[0]}, for instance. "
    return f"{cls.__name__} has no member {name!r}. {hint}The members are {', '.join(members)}."
