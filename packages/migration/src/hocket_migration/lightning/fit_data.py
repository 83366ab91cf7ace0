"""The data of a fit, an evaluation or a prediction, and how long a fit is with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from hocket.basics import seeding
from hocket.basics.time import Time, Unit
from hocket.data.adapters import adapt, prepared
from hocket.errors import WrongType, WrongValue
from hocket_migration.lightning import arguments, data
from hocket_migration.lightning.installed_lightning import overrides
from hocket_migration.lightning.task import LightningTask
from hocket_migration.lightning.trainer_view import TrainerView


class LoadingTrainer(TrainerView):
    """The part of the drop-in Trainer that asks modules for data."""

    #: The arguments of Lightning's Trainer, and those of hocket's that win over them.
    _given: dict[str, Any]
    _extra: dict[str, Any]
    _task: LightningTask | None = None
    #: Whether the fit validates.
    _validates = False
    #: Where `estimated_stepping_batches` and `fit` get the training data from, once.
    _train_source: Callable[[], Any] | None = None
    _train_data: Any = None
    #: The validation loaders that `fit` was given.
    _val_source: Any = None
    #: The loaders of training and validation that others replace, and the epoch in which they were made.
    _reloaded_train: data.Reloaded | None = None
    _reloaded_val: Sequence[data.Reloaded] = ()
    _train_epoch: float = 0
    _val_epoch: float = -math.inf
    #: Gives a batch of it the form in which the module gets it; None for no change.
    _unpack: Callable[[Any], Any] | None = None

    @property
    def enable_validation(self) -> bool:
        """Whether fit validates: there is a step for it, and data."""
        framework, module = self.framework, self.lightning_module
        if self.limit_val_batches == 0 or not overrides(module, "validation_step", framework.LightningModule):
            return False
        return (
            self._val_source is not None
            or overrides(module, "val_dataloader", framework.LightningModule)
            or (
                self.datamodule is not None
                and overrides(self.datamodule, "val_dataloader", framework.LightningDataModule)
            )
        )

    def _trains(self) -> bool:
        """Whether a fit has anything to do: batches, and epochs and steps that are left."""
        epochs, steps, time = self.max_epochs, self.max_steps, self._given["max_time"]
        over = (epochs not in (-1, None) and self.current_epoch >= epochs) or (
            steps != -1 and self.global_step >= steps
        )
        over |= time is not None and not arguments.seconds_of(time)
        if self.stops or self.limit_train_batches == 0 or (over and "duration" not in self._extra):
            return False
        self._train_batches()
        return self.num_training_batches != 0

    def _fit_loaders(self, task: LightningTask) -> list[Any]:
        """Make the data of a fit, in Lightning's order, and return the validation loaders.

        What a loader draws at random as it is made before a sanity check is undone, as Lightning undoes that check's.
        """
        validates = self._validates
        sanity = validates and self.num_sanity_val_steps > 0 and "overfit" not in self._extra
        evaluated: list[Any] = []
        self.keep(val_dataloaders=None)
        self.num_val_batches, self._val_loaders, self._reloaded_val = [], (), ()
        for name in ("val", "train") if sanity else ("train", "val"):
            if name == "train" and self.limit_train_batches != 0:
                self._train_batches()
            elif name == "val" and validates:
                with seeding.preserved() if sanity else nullcontext():
                    if sanity:
                        task.begin_sanity_check()
                    evaluated = self._new_val_loaders()
        return evaluated

    def _loaders(self, name: str, given: Any) -> Any:
        """Return loaders: those given, else those of the data module, else those of the module."""
        if given is not None:
            return given
        base = {True: self.framework.LightningDataModule, False: self.framework.LightningModule}
        for owner in (self.datamodule, self.lightning_module):
            if owner is not None and overrides(owner, name, base[owner is self.datamodule]):
                with self.hooks.named(name):
                    return getattr(owner, name)()
        raise WrongType(
            f"There is no data: {type(self.lightning_module).__name__} defines no {name}(). Define it, or give "
            f"{'train_dataloaders' if name.startswith('train') else 'dataloaders'}= or datamodule=."
        )

    def _not_empty(self, loaders: Mapping[str, Any], counts: Iterable[Any], limit: int | float) -> dict[str, Any]:
        """Return the loaders that have batches, limited to as many for each rank."""
        whole = limit == 1.0 and isinstance(limit, float)
        return {
            label: data.bounded(each) if whole else data.Limited(each, limit, self.world_size)
            for (label, each), count in zip(loaders.items(), counts, strict=True)
            if count
        }

    def _train_batches(self) -> Any:
        """Return the training data, made at the first call."""
        if self._train_data is None:
            self._train_data = self._new_train_data()
            if self._reloads:
                self._train_data = self._reloaded_train = data.Reloaded(self._train_data)
        return self._train_data

    def _new_train_data(self) -> Any:
        assert self._train_source is not None
        loaders, self._train_epoch = self._train_source(), self.current_epoch
        self.keep(train_dataloader=loaders)
        ordered = bool(self.overfit_batches)
        if self._reloads:
            found, unpack = data.side_by_side(loaders, self.framework, ordered), None
        else:
            found, unpack = data.training(loaders, self.framework, ordered)
        limit = self._extra.get("limit_train", self.limit_train_batches)
        limit = 1.0 if limit is None else limit
        limit = self._extra.get("overfit") or limit
        self.num_training_batches = data.limited(self._of_this_rank(found), limit)
        self._unpack = unpack
        if self._task is not None:
            self._task.unpack = unpack
        whole = limit == 1.0 and isinstance(limit, float)
        return data.Limited(found, limit, self.world_size) if self._reloads and not whole else found

    @property
    def _reloads(self) -> int:
        return int(self._given["reload_dataloaders_every_n_epochs"] or 0)

    def reload_training(self) -> None:
        """Ask for the training loaders again, in an epoch in which they are due."""
        if self._reloads and self.current_epoch - self._train_epoch >= self._reloads:
            assert self._reloaded_train is not None
            self._reloaded_train.loader = self._new_train_data()
            data.draw_as_iterated(self.train_dataloader)

    def prepare_validation(self) -> None:
        """Ask for the validation loaders again, in an epoch in which they are due; and set the epoch of their samplers."""
        if self._reloads and not self.sanity_checking and self.current_epoch - self._val_epoch >= self._reloads:
            loaders = list(self._sets_of(self._new_val_loaders()).values())
            if len(loaders) != len(self._reloaded_val):
                raise WrongValue(
                    f"val_dataloader() returned {len(loaders)} loaders with batches in epoch {self.current_epoch}, and "
                    f"{len(self._reloaded_val)} before. Return as many as before."
                )
            for each, loader in zip(self._reloaded_val, loaders, strict=True):
                each.loader = loader
        for each in self._val_loaders:
            data.set_sampler_epoch(each, self.current_epoch)

    #: The validation loaders of a fit.
    _val_loaders: Sequence[Any] = ()

    def _new_val_loaders(self) -> list[Any]:
        self.keep(val_dataloaders=self._loaders("val_dataloader", self._val_source))
        every = self.check_val_every_n_epoch
        # The loaders of a sanity check are also those of its epoch, if that is to be validated.
        due = every is None or not (self.current_epoch + 1) % every
        self._val_epoch = self.current_epoch if due else -math.inf
        found = data.evaluation(self.val_dataloaders, self.framework, bool(self.overfit_batches))
        self._val_loaders = found
        self.num_val_batches = [data.limited(each, self.limit_val_batches) for each in found]
        return found

    def _sets_of(self, evaluated: list[Any]) -> dict[str, Any]:
        """Return the validation loaders of a fit that have batches, by label."""
        labels = data.labelled(evaluated, "val_dataloader")
        return self._not_empty(labels, self.num_val_batches, self.limit_val_batches)

    def _validation_sets(self, evaluated: list[Any]) -> dict[str, Any]:
        """Return the sets of a fit, which other loaders may replace."""
        found = self._sets_of(evaluated)
        if not self._reloads:
            return found
        made = {label: data.Reloaded(each) for label, each in found.items()}
        self._reloaded_val = list(made.values())
        return made

    def _of_this_rank(self, loader: Any) -> Any:
        """Return an object whose ``len`` is the number of this rank's batches, if it is known."""
        run = self.run_state
        if run is None or self.world_size == 1:
            return loader
        source = adapt(prepared(loader, run.bus.prepare_data, True, self._extra.get("global_batch")), given=loader)
        length = source.length()
        return loader if length is None else range(length)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The optimizer steps of the whole run, or infinity if its length is unknown; loads the training data if need be."""
        if self._train_source is not None:
            self._train_batches()
        given = self._extra.get("duration")
        if given is None:
            return self._steps_of(self.max_epochs, self.max_steps)
        ends = {end.unit: end.value for end in map(_time, given if isinstance(given, list | tuple) else [given])}
        return self._steps_of(int(ends.get(Unit.EPOCH, -1)), int(ends.get(Unit.BATCH, -1)))

    def _steps_of(self, epochs: int | None, steps: int) -> int | float:
        window = self._extra.get("accumulate", f"{self.accumulate_grad_batches}ba")
        if epochs in (None, -1) or self.num_training_batches == math.inf:
            return math.inf if steps == -1 else steps
        total = math.ceil(self.num_training_batches / (1 if window is None else _time(window).value)) * max(epochs, 1)
        return total if steps == -1 else min(total, steps)

    @property
    def max_epochs(self) -> int | None:
        """The epochs of the run, -1 for no limit. None if they were not given, before the first call with a module."""
        given = self._given
        if given["max_epochs"] is None and self.lightning_module is None and not self.fast_dev_run:
            return None
        if self.fast_dev_run:
            return 1
        if given["max_epochs"] is not None:
            return int(given["max_epochs"])
        return 1000 if given["max_steps"] in (-1, None) and given["max_time"] is None else -1

    @property
    def max_steps(self) -> int:
        """The optimizer steps of the run, -1 for no limit."""
        return int(self.fast_dev_run) if self.fast_dev_run else int(self._given["max_steps"])


def _time(given: Any) -> Time:
    return given if isinstance(given, Time) else Time.parse(given)
