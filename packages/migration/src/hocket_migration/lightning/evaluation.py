"""Validation, test and prediction of a LightningModule: hocket's events call its hooks in Lightning's order."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

import hocket
from hocket.basics import seeding
from hocket.data.nesting import map_tensors
from hocket.errors import WrongType
from hocket_migration.lightning.installed_lightning import overrides
from hocket_migration.lightning.logged_values import Results, of_loader
from hocket_migration.lightning.trainer_view import TrainerView

if TYPE_CHECKING:
    from hocket.state.state import State


class EvaluatedModule(hocket.Task):
    """The part of a `LightningTask` that evaluates and predicts."""

    trainer: TrainerView
    _base: type
    _takes_index: Mapping[str, bool]
    _results: Results
    _shards: bool

    def __init__(self) -> None:
        super().__init__()
        #: What the latest step of the module returned, for its ``…_batch_end``, and the batch.
        self._output: Any = None
        self._batch: Any = None
        #: The evaluation in progress: "validation" or "test", its set's number, and its batch's.
        self.evaluates = "validation"
        self._set = -1
        self._eval_batch = 0
        #: The batches of each set that were evaluated since the fit or the evaluation began: the step of their rows.
        self._evaluated_batches: Counter[int] = Counter()
        #: Whether a validation comes between two batches of an accumulation window, whose gradients it leaves as they are.
        self._padding = self._within = False
        #: Whether the latest batch is in the trainer's counters, which it is from its end on.
        self._counted = False
        #: What the latest evaluation logged, by set.
        self.evaluated: list[dict[str, float]] = []
        #: The random numbers after an evaluation or a prediction, until the drop-in Trainer continues with them.
        self._drawn: Any = None
        #: What the predictions of several loaders are collected in; None for a prediction of hocket's own.
        self.predict_loop: Any = None

    def _transferred(self, batch: Any, loader: int) -> Any:
        raise NotImplementedError

    def _new_results(self, world: int, *, training: bool = False) -> Results:
        raise NotImplementedError

    def _log(self, state: State, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def begin_sanity_check(self) -> None:
        raise NotImplementedError

    def eval_forward(self, batch: Any) -> Any:
        """Call the module's ``validation_step``, ``test_step`` or ``predict_step``."""
        trainer = self.trainer
        name = "predict_step" if trainer.predicting else f"{self.evaluates}_step"
        if self._padding and not self._shards:  # it counts nothing, and no other rank waits for this one
            self._output = None
            return None
        self._output = trainer.hooks.module(name, *self._arguments(name, batch))
        return self._output

    def _arguments(self, name: str, batch: Any) -> tuple[Any, ...]:
        arguments = (batch, *(self._place if self._takes_index[name] else self._place[1:]))
        if self._eval_batch == 0:
            try:
                inspect.signature(getattr(self.model, name)).bind(*arguments)
            except TypeError as error:
                written = "self, batch, batch_idx" + ", dataloader_idx" * self._several
                raise WrongType(
                    f"{type(self.model).__name__}.{name} cannot be called with {len(self._sets)} loader"
                    f"{'s' * self._several}: {error}. Write {name}({written})"
                    + (", or give one loader." if self._several else ", or give dataloader_idx the default 0.")
                ) from error
        return arguments

    @property
    def _several(self) -> bool:
        return len(self._sets) > 1

    def has_eval_loss(self, outputs: Any) -> bool:
        """Evaluation reports what the module logs."""
        return False

    def check_evaluation(self) -> None:
        """Raise TypeError if the module has no step to evaluate with."""
        name = f"{self.evaluates}_step"
        if not overrides(self.model, name, self._base):
            raise WrongType(
                f"{type(self.model).__name__} has no {name}, so there is nothing to evaluate. Define it, or omit the data."
            )

    # --- evaluation

    @property
    def _sets(self) -> list[str]:
        run = self.trainer.run_state
        return self.set_labels or ([] if run is None else list(run.eval_sets))

    #: The labels of the sets that are evaluated, if they are not the Trainer's.
    set_labels: list[str] = []  # replaced, never changed

    def eval_before_all(self, state: State) -> None:
        """``on_validation_start`` and ``on_validation_epoch_start``, or those of a test."""
        trainer, hooks, kind = self.trainer, self.trainer.hooks, self.evaluates
        self._before = trainer.state.fn, trainer.state.stage, trainer._results
        sanity = trainer.sanity_checking
        if not sanity:
            trainer.state.stage = trainer._states.RunningStage["TESTING" if kind == "test" else "VALIDATING"]
        trainer._results = results = self._new_results(state.strategy.world_size)
        self._evaluation, self._set, self._sanity = results, -1, sanity
        self._fits = trainer.state.fn == trainer._states.TrainerFn.FITTING
        if not self._fits:
            self._evaluated_batches.clear()
        if sanity:
            self.begin_sanity_check()
            self._sanity_begun = False
        if self._fits:
            trainer.prepare_validation()
        if self._fits and not sanity and not self._within:
            hooks.module("on_validation_model_zero_grad")
        hooks.module(f"on_{kind}_model_eval")
        hooks.both(f"on_{kind}_start")
        hooks.both(f"on_{kind}_epoch_start")

    def eval_start(self, state: State) -> None:
        """Begin a set."""
        self._set, self._eval_batch = self._sets.index(str(state.eval_label)), -1
        self._evaluation.loader = self._set if self._several else None

    def eval_batch_start(self, state: State) -> None:
        """The hooks of the transfer, and ``on_validation_batch_start``."""
        self._eval_batch += 1
        self._padding = self._evaluation.padding = state.aggregates.samples == 0
        self._batch = state.batch = self._transferred(state.batch, self._set)
        self._evaluation.next_batch()
        if not self._padding:
            self._eval_hook("start")

    def _eval_hook(self, point: str, *outputs: Any) -> None:
        self.trainer.hooks.both(f"on_{self.evaluates}_batch_{point}", *outputs, self._batch, *self._place)

    @property
    def _place(self) -> tuple[int, ...]:
        """The number of the batch, and where there are several sets, of its set."""
        return (self._eval_batch, self._set) if self._several else (self._eval_batch,)

    def eval_batch_end(self, state: State) -> None:
        """``on_validation_batch_end``."""
        if not self._padding:
            self._eval_hook("end", self._output)
            values = self._evaluation.of_step(stale=True)
            self.trainer.note(values)
            if not self._sanity:
                self.trainer.write(values["log"], self._evaluated_batches[self._set])
                self._evaluated_batches[self._set] += 1
        self._padding = False

    def eval_end(self, state: State) -> None:
        """Give hocket the values of this set."""
        for name, value in self._of_set(self._evaluation.of_epoch(), self._set).items():
            try:
                state.log({name: value}, reduce="mean", weight=1.0)
            except ValueError:  # reserved, such as val_dataloader/loss; `_log` logs it by its own name
                continue

    def eval_after_all(self, state: State) -> None:
        """``on_validation_epoch_end`` and ``on_validation_end``."""
        trainer, hooks, kind, results = self.trainer, self.trainer.hooks, self.evaluates, self._evaluation
        sanity = self._sanity
        results.loader, self._batch = None, None
        results.next_batch()
        trainer.note(results.of_epoch(final=False))
        hooks.both(f"on_{kind}_epoch_end")
        values = results.of_epoch()
        trainer.note(values)
        self.evaluated = [self._of_set(values, number) for number in range(len(self._sets))]
        if not sanity:
            self._log(state, values["log"])
            trainer.write(values["log"], behind=int(self._counted and self._fits))
        hooks.both(f"on_{kind}_end")
        hooks.module(f"on_{kind}_model_train")
        if sanity:
            hooks.callbacks("on_sanity_check_end")
            trainer.forget_values()
        else:
            trainer.validated = True
        results.reset()
        trainer.state.fn, trainer.state.stage, trainer._results = self._before
        if trainer.evaluation_draws and not sanity:
            self._drawn = seeding.capture()

    def _of_set(self, values: Mapping[str, Mapping[str, Any]], number: int) -> dict[str, float]:
        """Return the values of a set, as Lightning's ``validate`` and ``test`` return them."""
        found = values.get(of_loader(None), {}) | values.get(of_loader(number), {})  # type: ignore[operator]  # dicts
        return {name: value.item() if isinstance(value, Tensor) else value for name, value in found.items()}

    # --- prediction

    def predict_start(self, state: State) -> None:
        """``on_predict_start`` and ``on_predict_epoch_start``."""
        trainer = self.trainer
        trainer.enter("PREDICTING", "PREDICTING")
        self._eval_batch, self._padding = -1, False
        self._set = max(self._set, 0)
        trainer._results = None
        if self.predict_loop is not None and self._set > 0:  # the hooks are those of all loaders together
            return
        trainer.hooks.module("on_predict_model_eval")
        trainer.hooks.both("on_predict_start")
        trainer.hooks.both("on_predict_epoch_start")

    def predict_batch_start(self, state: State) -> None:
        """The hooks of the transfer, and ``on_predict_batch_start``."""
        self._eval_batch += 1
        self._batch = state.batch = self._transferred(state.batch, self._set)
        self.trainer.hooks.both("on_predict_batch_start", self._batch, *self._place)

    def predict_batch_end(self, state: State) -> None:
        """``on_predict_batch_end``."""
        self.trainer.hooks.both("on_predict_batch_end", self._output, self._batch, *self._place)
        if self.predict_loop is not None:
            self.predict_loop.add(self._set, self._output)

    def predict_end(self, state: State) -> None:
        """``on_predict_epoch_end`` and ``on_predict_end``."""
        trainer = self.trainer
        if trainer.evaluation_draws:
            self._drawn = seeding.capture()
        if self.predict_loop is not None and self._set + 1 < self.predict_loop.num_dataloaders:
            return
        trainer.hooks.both("on_predict_epoch_end")
        trainer.hooks.both("on_predict_end")
        trainer.state.stage = None

    def continue_random_numbers(self) -> None:
        """Continue with the random numbers after an evaluation, as Lightning does; hocket has restored those before it."""
        if self._drawn is not None:
            seeding.restore(self._drawn)
            self._drawn = None


class PredictLoop:
    """The predictions so far, which prediction writers read."""

    #: The samples of a batch, which depend on the loader's sampler, are not known.
    current_batch_indices = None
    epoch_batch_indices = None

    def __init__(self, loaders: Sequence[Any] = (), keeps: bool = True) -> None:
        self.num_dataloaders, self._keeps = len(loaders), keeps
        self._predictions: list[list[Any]] = [[] for _ in loaders]

    @property
    def predictions(self) -> list[Any]:
        """The predictions of each batch, in a list for each loader if there are several."""
        return self._predictions[0] if self.num_dataloaders == 1 else self._predictions

    def forget(self) -> None:
        """Drop the predictions, which nobody reads any more."""
        self._predictions = [[] for _ in self._predictions]

    def add(self, number: int, prediction: Any) -> None:
        """Add the prediction of a batch of a loader, if somebody reads it at the end."""
        if not self._keeps:
            return
        self._predictions[number].append(map_tensors(lambda tensor: tensor.cpu(), prediction))
