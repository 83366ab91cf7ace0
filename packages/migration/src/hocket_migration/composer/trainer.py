"""Composer's Trainer, which makes and runs one of hocket's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hocket import Decision, EvalSet
from hocket.errors import WrongValue
from hocket.hookspecs.attachment import Attachment
from hocket.optim.learning_rate_schedules import make_schedules
from hocket_migration.composer import arguments, checkpoint_loading
from hocket_migration.composer.callbacks import CheckpointSaver
from hocket_migration.composer.checkpoint_saving import NamedCheckpoints
from hocket_migration.composer.core.data_spec import Parts, ensure_data_spec
from hocket_migration.composer.core.evaluator import interval
from hocket_migration.composer.core.precision import Precision
from hocket_migration.composer.core.state import State
from hocket_migration.composer.core.time import Time
from hocket_migration.composer.loggers.logger import Logger
from hocket_migration.composer.message_terms import translated
from hocket_migration.composer.optim.schedulers import Schedulers, every_batch
from hocket_migration.composer.plugin_factory import refuse
from hocket_migration.composer.task import ComposerTask
from hocket_migration.composer.trainer_plugins import AskedIntervals, DataFunctions, Positions, StartSchedules

#: Arguments of the Trainer that only their default may be given for: it, and what to write.
REFUSED: Mapping[str, tuple[Any, str]] = {
    "train_dataloader_label": ("train", "Values of training are 'train/…'."),
    "algorithm_passes": (None, "Order algorithms by their phase, before= and after=."),
    "spin_dataloaders": (
        True,
        "A resumed run continues within the epoch; load_ignore_keys=['state/timestamp'] begins anew.",
    ),
    "log_traces": (False, "Print them in a Callback."),
    "load_object_store": (None, "Load from a folder, or with resume= and a URL in hocket={…}."),
    "save_ignore_keys": (None, "Checkpoints hold all of the state."),
    "save_metrics": (False, "Checkpoints hold all of the state."),
    "precision_config": (None, "Set it in hocket={'precision': …}."),
    "accumulate_train_batch_on_tokens": (
        False,
        "Return (mean, number of tokens) from the model's loss: hocket weights means by it.",
    ),
    "profiler": (None, "Write hocket={'profile': '5ba after 10ba'}."),
}
#: The same of `Trainer.fit`.
REFUSED_OF_FIT: Mapping[str, tuple[Any, str]] = {
    "train_dataloader_label": ("train", "Give it to the Trainer."),
    "train_subset_num_batches": (None, "Give it to the Trainer."),
    "spin_dataloaders": (None, "Give it to the Trainer."),
    "reset_time": (False, "Make a new Trainer with model=trainer.state.model."),
}


class Trainer:
    """Train a ComposerModel: Composer's arguments and methods, run by a `hocket.Trainer`.

    Each argument means what it means in Composer; docs/reference/drop-in-composer.md lists them, and where the result differs.
    One that hocket has no counterpart of is refused by name. ``hocket={…}`` gives further arguments of `hocket.Trainer`, which
    replace those translated from Composer's.

    Attributes:
        hocket: the `hocket.Trainer`.
        state: the `State` of the run.
        logger: the `Logger`.

    Raises:
        TypeError, ValueError: an argument is invalid, or has no counterpart; the message says what to write.

    Example:
        >>> import torch
        >>> from hocket_migration.composer import Trainer
        >>> from hocket_migration.composer.models import ComposerClassifier
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(0, 10, (32,)))
        >>> model = ComposerClassifier(torch.nn.Linear(8, 10), num_classes=10)
        >>> trainer = Trainer(
        ...     model=model, train_dataloader=torch.utils.data.DataLoader(data, batch_size=8), max_duration="2ep",
        ...     eval_dataloader=torch.utils.data.DataLoader(data, batch_size=8), device="cpu", progress_bar=False,
        ...     optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        ... )
        >>> trainer.fit()
        >>> trainer.state.timestamp.batch == "8ba", list(trainer.state.eval_metric_values)
        (True, ['CrossEntropy', 'MulticlassAccuracy'])
    """

    @translated()
    def __init__(
        self,
        *,
        model: Any,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        spin_dataloaders: bool = True,
        max_duration: int | str | Time | None = None,
        algorithms: Any = None,
        algorithm_passes: Any = None,
        optimizers: Any = None,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_interval: int | str | Time | Callable[[Any, Any], bool] = 1,
        eval_subset_num_batches: int = -1,
        callbacks: Any = None,
        loggers: Any = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_stream: Any = "stderr",
        console_log_interval: int | str | Time = "1ba",
        log_traces: bool = False,
        auto_log_hparams: bool = False,
        load_path: str | Path | None = None,
        load_object_store: Any = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_progress_bar: bool = True,
        load_ignore_keys: Any = None,
        load_exclude_algorithms: Sequence[str] | None = None,
        save_folder: str | Path | None = None,
        save_filename: str = "ep{epoch}-ba{batch}-rank{rank}.pt",
        save_latest_filename: str | None = "latest-rank{rank}.pt",
        save_overwrite: bool = False,
        save_interval: int | str | Time | Callable[[Any, Any], bool] = "1ep",
        save_weights_only: bool = False,
        save_ignore_keys: Any = None,
        save_num_checkpoints_to_keep: int = -1,
        save_metrics: bool = False,
        autoresume: bool = False,
        parallelism_config: Any = None,
        fsdp_config: Mapping[str, Any] | None = None,
        device: Any = None,
        precision: str | Precision | None = None,
        precision_config: Any = None,
        device_train_microbatch_size: Any = None,
        accumulate_train_batch_on_tokens: bool = False,
        seed: int | None = None,
        deterministic_mode: bool = False,
        dist_timeout: float = 300.0,
        ddp_sync_strategy: Any = None,
        profiler: Any = None,
        python_log_level: str | None = None,
        compile_config: Mapping[str, Any] | None = None,
        hocket: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        values = dict(locals())
        arguments.refuse_unknown(unknown)
        for name, (default, instead) in REFUSED.items():
            refuse("Trainer", instead, **{name: (values[name], default)})
        if python_log_level is not None:
            logging.getLogger("hocket").setLevel(python_log_level.upper())

        self.task = task = ComposerTask(model)
        optimizer = arguments.optimizer_of(optimizers, model)
        chosen = arguments.precision_of(precision, device)
        self.state = view = State(task, [] if optimizer is None else [optimizer], chosen)
        given_loggers = arguments.as_list(loggers)
        self.logger = view.logger = Logger(view, given_loggers)
        if isinstance(model, torch.nn.Module):
            object.__setattr__(model, "logger", self.logger)
        view.algorithms, view.callbacks = arguments.as_list(algorithms), arguments.as_list(callbacks)

        duration = arguments.duration_of(max_duration, scale_schedule_ratio)
        view._planned = duration
        self._schedulers = self._made_schedulers(
            schedulers, scale_schedule_ratio, step_schedulers_every_batch, optimizer
        )
        self._ssr = scale_schedule_ratio
        spec = None if train_dataloader is None else ensure_data_spec(train_dataloader)
        task.train_spec, view.train_dataloader = spec, None if spec is None else spec.dataloader
        self._eval_subset = _limit(eval_subset_num_batches)
        self._set_evaluators(eval_dataloader)

        loaded = checkpoint_loading.find(load_path)
        view.algorithms += checkpoint_loading.required_algorithms(loaded, view.algorithms, load_exclude_algorithms)
        run_name = run_name or os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
        saving: dict[str, Any] = {
            "save_folder": save_folder, "save_filename": save_filename, "save_latest_filename": save_latest_filename,
            "save_interval": save_interval, "save_overwrite": save_overwrite, "save_weights_only": save_weights_only,
            "save_num_checkpoints_to_keep": save_num_checkpoints_to_keep,
        }  # fmt: skip
        savers = [each for each in view.callbacks if isinstance(each, CheckpointSaver)]
        if len(savers) + (save_folder is not None) > 1:
            raise WrongValue(
                "hocket writes the checkpoints of a run into one folder. Pass save_folder=, or one CheckpointSaver."
            )
        saving |= savers[0].arguments if savers else {}
        folder = saving["save_folder"]
        if folder is not None and "{run_name}" in str(folder) and run_name is None:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise WrongValue(f"save_folder={str(folder)!r} needs run_name=, which all ranks have to be given.")
            run_name = time.strftime("%Y%m%d-%H%M%S")
        self._checkpoints = None if folder is None else _checkpoints(run_name, **saving)
        if autoresume and (self._checkpoints is None or run_name is None):
            raise WrongValue(
                "autoresume=True needs save_folder= and run_name=, so that the next process finds the checkpoints."
            )

        asking = {label: each.eval_interval for label, each in task.evaluators.items() if callable(each.eval_interval)}
        if callable(eval_interval):
            asking |= {label: eval_interval for label, each in task.evaluators.items() if each.eval_interval is None}
        asked = saving["save_interval"] if callable(saving["save_interval"]) else None
        internal: list[Any] = [Positions(view)]
        internal += [StartSchedules(self._schedulers)] if self._schedulers is not None else []
        if asking or asked is not None:
            internal.append(AskedIntervals(view, list(asking.values()), asked))
        given: dict[str, Any] = {
            "train_data": None if spec is None else spec.dataloader,
            "eval_data": self._eval_sets(interval(eval_interval)) or None,
            "optimizer": optimizer,
            "schedule": None if self._schedulers is None else lambda _: self._schedulers,
            "schedule_every": None if self._schedulers is None else "1ba" if self._schedulers.every_batch else "1ep",
            "duration": None if duration is None else str(duration),
            "algorithms": [
                *DataFunctions.needed(task),
                *(arguments.algorithm(each, view) for each in view.algorithms),
            ],
            "callbacks": [*internal, *(arguments.callback(each, view) for each in view.callbacks)],
            "loggers": [
                *(arguments.logger(each, view) for each in given_loggers),
                *arguments.bars(progress_bar, log_to_console, console_stream, console_log_interval, given_loggers),
            ],
            "strategy": arguments.strategy_of(parallelism_config, fsdp_config, dist_timeout),
            "precision": chosen.plugin,
            "device": arguments.device_of(device),
            "microbatch": arguments.microbatch_of(device_train_microbatch_size),
            "eval_every": _every(eval_interval),
            "log_every": "1ba",
            "seed": seed,
            "deterministic": deterministic_mode,
            "compile": False if compile_config is None else dict(compile_config) or True,
            "checkpoints": self._checkpoints,
            "resume": checkpoint_loading.resume_of(loaded, load_weights_only, load_ignore_keys, autoresume),
            "run_name": run_name,
            "limit_train": _limit(train_subset_num_batches)
            if spec is None
            else spec.limit(_limit(train_subset_num_batches)),
        }
        #: The Trainer of hocket's that does everything.
        self.hocket = arguments.make_trainer(task, given, hocket or {})
        view.bind(self.hocket.state)
        self._given_duration = duration
        if loaded is not None and not self.hocket.state.timestamp.batch:
            checkpoint_loading.load(
                self.hocket, task, loaded,
                weights_only=load_weights_only, strict=load_strict_model_weights, ignore=load_ignore_keys,
            )  # fmt: skip
            if self._schedulers is not None and not load_weights_only and loaded.timestamp is not None:
                self._schedulers.resumed(loaded.schedulers)

    # --- made from arguments

    def _made_schedulers(self, given: Any, ssr: float, every: bool | None, optimizer: Any) -> Schedulers | None:
        schedulers = arguments.as_list(given)
        if not schedulers:
            if ssr != 1.0:
                raise WrongValue(
                    f"scale_schedule_ratio={ssr} scales schedulers, and there are none. Pass schedulers=, or omit it."
                )
            return None
        if optimizer is None:
            raise WrongValue("schedulers= needs optimizers=, the optimizer whose learning rates they set.")
        made = Schedulers(schedulers, self.state, optimizer, ssr, every_batch(schedulers, every))
        self.state.schedulers = made.in_use
        return made

    def _set_evaluators(self, given: Any) -> None:
        evaluators = arguments.evaluators_of(given)
        for each in evaluators:
            self.task.evaluators[each.label] = each
        self.state.evaluators = list(self.task.evaluators.values())

    def _eval_sets(self, every: str | None, only: Iterable[str] | None = None) -> dict[str, EvalSet]:
        labels = self.task.evaluators if only is None else only
        return {label: self.task.evaluators[label].eval_set(every, self._eval_subset) for label in labels}

    # --- public methods

    @translated()
    def fit(
        self,
        *,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int | None = None,
        spin_dataloaders: bool | None = None,
        duration: int | str | Time | None = None,
        reset_time: bool = False,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_subset_num_batches: int = -1,
        eval_interval: int | str | Time = 1,
        device_train_microbatch_size: Any = None,
        precision: str | Precision | None = None,
    ) -> None:
        """Train until ``max_duration``, or for ``duration`` more.

        Raises:
            ValueError: an argument has no counterpart here, or there is nothing to train for.
        """
        values = dict(locals())
        for name, (default, instead) in REFUSED_OF_FIT.items():
            refuse("fit", instead, **{name: (values[name], default)})
        write = "Give it to the Trainer."
        if precision is not None and Precision(precision) is not self.state.precision:
            refuse("fit", write, precision=(precision, None))
        if schedulers is not None:
            self._replace_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        if device_train_microbatch_size is not None:
            microbatch = arguments.microbatch_of(device_train_microbatch_size)
            if microbatch == "auto":
                refuse("fit", write, device_train_microbatch_size=(microbatch, None))
            self.hocket.state.request_microbatch(microbatch)
        more: dict[str, Any] = {}
        if train_dataloader is not None:
            spec = self.task.train_spec = ensure_data_spec(train_dataloader)
            if spec.batch_transforms or spec.microbatch_transforms:
                raise WrongValue("fit(train_dataloader=DataSpec(…)) cannot have transforms. Give it to the Trainer.")
            self.state.train_dataloader = more["train_data"] = spec.dataloader
        if eval_dataloader is not None:
            self._eval_subset = _limit(eval_subset_num_batches)
            self.task.evaluators.clear()
            self._set_evaluators(eval_dataloader)
            more["eval_data"] = self._eval_sets(interval(eval_interval))
        if duration is not None:
            more["duration"] = str(arguments.duration_of(duration, 1.0))
        elif self._given_duration is not None and self.state.timestamp >= self._given_duration:
            raise WrongValue(
                f"Training is over: {self._given_duration} are done. Write fit(duration='1ep') or the like to train longer."
            )
        self.hocket.fit(**more)

    def _replace_schedulers(self, given: Any, ssr: float, every: bool | None) -> None:
        if self._schedulers is None:
            self._add_schedulers(given, ssr, every)
            return
        schedulers = arguments.as_list(given)
        if every_batch(schedulers, every) != self._schedulers.every_batch:
            raise WrongValue(
                "fit(schedulers=…) are stepped as those of the Trainer. Give step_schedulers_every_batch= to both."
            )
        self._schedulers.replace(schedulers, ssr)
        self.state.schedulers = self._schedulers.in_use

    def _add_schedulers(self, given: Any, ssr: float, every: bool | None) -> None:
        """Use schedulers in a run that began without any."""
        state = self.hocket.state
        made = self._made_schedulers(given, ssr, every, next(iter(self.state.optimizers), None))
        if made is not None:
            interval = "1ba" if made.every_batch else "1ep"
            state.schedules.extend(make_schedules(lambda _: made, state.optimizers, interval, state.optimizer_names))
            state.bus.attach(Attachment("callbacks", "schedulers of fit", StartSchedules(made)))
            self._schedulers = made

    @translated()
    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> None:
        """Evaluate the given sets, or the Trainer's. The values are in ``state.eval_metric_values``.

        Raises ValueError without any set.
        """
        self.state.standalone = True
        try:
            self._eval(eval_dataloader, subset_num_batches)
        finally:
            self.state.standalone = False

    def _eval(self, eval_dataloader: Any, subset_num_batches: int) -> None:
        if eval_dataloader is None and subset_num_batches == -1:
            self.hocket.evaluate()
            return
        before = self._eval_subset, dict(self.task.evaluators)
        self._eval_subset = _limit(subset_num_batches)
        labels = list(self.task.evaluators)
        try:
            if eval_dataloader is not None:
                self._set_evaluators(eval_dataloader)
                labels = [each.label for each in arguments.evaluators_of(eval_dataloader)]
            self.hocket.evaluate(self._eval_sets(None, labels))
        finally:
            self._eval_subset, evaluators = before
            self.task.evaluators.clear()
            self.task.evaluators.update(evaluators)
            self.state.evaluators = list(evaluators.values())

    @translated()
    def predict(self, dataloader: Any, subset_num_batches: int = -1, *, return_outputs: bool = True) -> list[Any]:
        """Return the outputs of each batch, on the CPU; an empty list unless ``return_outputs``."""
        spec = ensure_data_spec(dataloader)
        return self.hocket.predict(Parts(spec, _limit(subset_num_batches), None), keep=return_outputs)

    @translated()
    def save_checkpoint(self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False) -> str:
        """Write the state into a file, and return its path. Call it between fits, or on BATCH_CHECKPOINT and EPOCH_CHECKPOINT.

        ``load_path`` takes the file. As in Composer's, the weights are at ``["state"]["model"]``.
        """
        return checkpoint_loading.save(self.hocket, self.task, name, weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Request a checkpoint in ``save_folder`` after the current batch. Raises ValueError without a folder."""
        if self._checkpoints is None:
            raise WrongValue("save_checkpoint_to_save_folder() needs the Trainer's save_folder=.")
        self.hocket.state.request(Decision.CHECKPOINT)

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of the checkpoints in ``save_folder`` that this Trainer has written, oldest first."""
        return [] if self._checkpoints is None else list(self._checkpoints.linked)

    def close(self) -> None:
        """Release the resources of all plug-ins."""
        self.hocket.close()


def _checkpoints(run_name: str | None, **saving: Any) -> NamedCheckpoints:
    """Return hocket's checkpoints of the Trainer's arguments. Raises ValueError if none would be kept."""
    keep = saving["save_num_checkpoints_to_keep"]
    if keep == 0:
        raise WrongValue("save_num_checkpoints_to_keep=0 keeps none. Give 1 or more, -1 for all, or omit save_folder=.")
    period = interval(saving["save_interval"], "save_interval")
    return NamedCheckpoints(
        str(saving["save_folder"]).replace("{run_name}", run_name or ""),
        saving["save_filename"],
        saving["save_latest_filename"],
        every=None if period == "0ba" else period,
        keep=None if keep < 0 else keep,
        overwrite=saving["save_overwrite"],
        weights_only=saving["save_weights_only"],
    )


def _limit(batches: int) -> int | None:
    """Return a number of batches, or None for Composer's -1."""
    return None if batches is None or batches < 0 else batches


def _every(given: Any) -> str | None:
    every = interval(given)
    return None if every == "0ba" else every
