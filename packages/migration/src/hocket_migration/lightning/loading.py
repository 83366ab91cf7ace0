"""The data of a fit, an evaluation or a prediction, and how long a fit is with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from hocket.data.adapters import adapt
from hocket.data.several import prepared
from hocket.time import Time, Unit
from hocket.training import seeding
from hocket_migration.lightning import arguments, data
from hocket_migration.lightning.framework import overrides
from hocket_migration.lightning.task import LightningTask
from hocket_migration.lightning.view import TrainerView


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
        over = (epochs != -1 and self.current_epoch >= epochs) or (steps != -1 and self.global_step >= steps)
        over |= time is not None and not arguments.seconds_of(time)
        if self.stops or self.limit_train_batches == 0 or (over and "duration" not in self._extra):
            return False
        self._train_batches()
        return self.num_training_batches != 0

    def _fit_loaders(self, task: LightningTask, val_dataloaders: Any) -> list[Any]:
        """Make the data of a fit, in Lightning's order, and return the validation loaders.

        What a loader draws at random as it is made before a sanity check is undone, as Lightning undoes that check's.
        """
        validates = self._validates
        sanity = validates and self.num_sanity_val_steps > 0 and "overfit" not in self._extra
        evaluated: list[Any] = []
        self.keep(val_dataloaders=None)
        for name in ("val", "train") if sanity else ("train", "val"):
            if name == "train" and self.limit_train_batches != 0:
                self._train_batches()
            elif name == "val" and validates:
                with seeding.preserved() if sanity else nullcontext():
                    if sanity:
                        task.begin_sanity_check()
                    self.keep(val_dataloaders=self._loaders("val_dataloader", val_dataloaders))
                    evaluated = data.evaluation(self.val_dataloaders, self.framework, bool(self.overfit_batches))
        self.num_val_batches = [data.limited(each, self.limit_val_batches) for each in evaluated]
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
        raise TypeError(
            f"There is no data: {type(self.lightning_module).__name__} defines no {name}(). Define it, or give "
            f"{'train_dataloaders' if name.startswith('train') else 'dataloaders'}= or datamodule=."
        )

    def _not_empty(self, loaders: Mapping[str, Any], counts: Iterable[Any], limit: int | float) -> dict[str, Any]:
        """Return the loaders that have batches, limited to as many for each rank."""
        whole = limit == 1.0 and isinstance(limit, float)
        return {
            label: each if whole else data.Limited(each, limit, self.world_size)
            for (label, each), count in zip(loaders.items(), counts, strict=True)
            if count
        }

    def _train_batches(self) -> Any:
        """Return the training data, made at the first call."""
        if self._train_data is None:
            assert self._train_source is not None
            loaders = self._train_source()
            self.keep(train_dataloader=loaders)
            self._train_data, unpack = data.training(loaders, self.framework, ordered=bool(self.overfit_batches))
            limit = self._extra.get("limit_train", self.limit_train_batches)
            limit = 1.0 if limit is None else limit
            limit = self._extra.get("overfit") or limit
            self.num_training_batches = data.limited(self._of_this_rank(self._train_data), limit)
            self._unpack = unpack
            if self._task is not None:
                self._task.unpack = unpack
        return self._train_data

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
    def max_epochs(self) -> int:
        """The epochs of the run, -1 for no limit."""
        given = self._given
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
