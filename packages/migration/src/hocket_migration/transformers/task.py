"""The Task of a transformers Trainer: its `compute_loss` in training, its `prediction_step` in evaluation."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor

from hocket.basics.losses import Loss
from hocket.basics.types import Batch
from hocket.data import Window
from hocket.errors import WrongType
from hocket.state.task import Task

if TYPE_CHECKING:
    from hocket.state.state import State
    from hocket_migration.transformers.trainer import OnHocket


class Computed(NamedTuple):
    """What `compute_loss` returned for a microbatch: the loss, and the outputs of the model."""

    loss: Tensor
    outputs: Any


class Predicted(NamedTuple):
    """What `prediction_step` returned for a batch: each is None if there is none, tensors on the device."""

    loss: Tensor | None
    logits: Any
    labels: Any


class TrainerTask(Task):
    """Train the model of a transformers Trainer by the methods of the Trainer, which a subclass may override.

    A loss that is divided by ``num_items_in_batch``, the number of labels in all batches of a step and on all ranks, is one
    summand of the loss of the step. Any other is a mean, and is weighted by samples.
    """

    def __init__(self, trainer: OnHocket) -> None:
        super().__init__()
        assert trainer.model is not None
        self.network = trainer.model
        self._trainer = trainer
        #: Labels in all batches of the current step on all ranks, or None if the loss does not depend on it.
        self._items: Any = None
        #: Batches of the current step that are still without a loss.
        self._left = 0
        #: The states of the generators of Python, NumPy and torch after the last evaluation.
        self.random_numbers: Any = None

    @property
    def model(self) -> Any:
        """The model of the Trainer."""
        return self.network

    @model.setter
    def model(self, module: Any) -> None:
        self.network = module
        self._trainer.model = module

    # --- training

    def before_train_batch(self, state: State) -> None:
        """Count the labels of the step."""
        batch = state.batch
        batches = list(batch.batches) if type(batch) is Window else [batch]
        trainer = self._trainer
        taken, items = trainer.get_batch_samples(iter(batches), len(batches), state.device)
        if len(taken) != len(batches) or any(one is not other for one, other in zip(taken, batches, strict=True)):
            raise WrongType(
                f"get_batch_samples of {type(trainer).__name__} returned other batches than it was given, which hocket has "
                "counted already. Change them in the data set or in data_collator, and return them as they are."
            )
        if items is not None and state.strategy.world_size > 1:
            mine = torch.as_tensor(items, dtype=torch.float64 if state.device.type != "mps" else torch.float32)
            items = state.bus.all_reduce(mine.to(state.device) * bool(state.rank_samples), "sum")
        self._items, self._left = items, len(batches)
        trainer.current_gradient_accumulation_steps = len(batches)

    def forward(self, batch: Batch) -> Computed:
        """Return what `compute_loss` returns for a microbatch."""
        trainer = self._trainer
        self._left -= 1
        trainer.accelerator.gradient_state._set_sync_gradients(self._left <= 0)
        self.network.train()  # as transformers before each batch, since callbacks and losses may leave it in eval mode
        trainer.note_inputs(batch)
        inputs = trainer._prepare_inputs(copy.copy(batch))  # `compute_loss` may take labels out of it
        options = {"return_outputs": True} if "train_metrics" in trainer.hocket_arguments else {}
        with trainer.compute_loss_context_manager(), self._precision_of_the_model_alone():
            found = trainer.compute_loss(self.network, inputs, num_items_in_batch=self._items, **options)
        computed = Computed(*found) if isinstance(found, tuple) and len(found) == 2 else Computed(found, None)
        if not isinstance(computed.loss, Tensor):
            raise WrongType(
                f"compute_loss of {type(trainer).__name__} returned {found!r}. Return the loss, a Tensor, or (loss, outputs) "
                "where return_outputs is True."
            )
        return computed

    @contextmanager
    def _precision_of_the_model_alone(self) -> Iterator[None]:
        """Autocast the model only, and return its outputs in float32, as accelerate does; the loss is computed in float32."""
        kind = next(self.network.parameters()).device.type
        if not torch.is_autocast_enabled(kind):
            yield
            return
        dtype, forward = torch.get_autocast_dtype(kind), self.network.forward

        @functools.wraps(forward)  # `generate` reads its signature
        def autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(kind, dtype):
                return convert_to_fp32(forward(*args, **kwargs))

        own = vars(self.network).get("forward")
        self.network.forward = autocast
        try:
            with torch.autocast(kind, enabled=False):
                yield
        finally:
            del self.network.forward
            if own is not None:
                self.network.forward = own

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the loss with its weight."""
        counted = self.count(batch)
        samples = counted if isinstance(counted, int) else counted.samples
        if isinstance(outputs, Predicted):
            assert outputs.loss is not None  # `has_eval_loss`
            return Loss(outputs.loss, self._weight(batch, samples), reduction="mean")
        if self._trainer.sums_losses(self._items):
            return Loss(outputs.loss, samples, reduction="sum")
        return Loss(outputs.loss, samples, reduction="mean")

    def _weight(self, batch: Batch, samples: int) -> Any:
        """Return the number of labels in a batch of an evaluation, or its samples if the loss does not count labels."""
        trainer = self._trainer
        items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1]
        return items if trainer.sums_losses(items) else samples

    # --- evaluation

    def eval_forward(self, batch: Batch) -> Predicted:
        """Return what `prediction_step` returns for a batch."""
        trainer = self._trainer
        options = trainer.prediction_options
        with self._precision_of_the_model_alone():
            return Predicted(*trainer.prediction_step(self.network, copy.copy(batch), *options))

    def eval_batch_end(self, state: State) -> None:
        """Call ``on_prediction_step`` of the callbacks."""
        trainer = self._trainer
        trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)

    def eval_after_all(self, state: State) -> None:
        """Note the random numbers, which hocket restores after an evaluation and transformers does not."""
        self.random_numbers = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    def has_eval_loss(self, outputs: Any) -> bool:
        """Whether the batch had labels."""
        return isinstance(outputs, Predicted) and outputs.loss is not None

    def update_metric(self, metric: Any, outputs: Any, batch: Batch) -> None:
        """Call ``metric.update(logits, labels)``, and the collector of predictions with everything."""
        if getattr(metric, "collects", False):
            metric.update(outputs, batch)
        elif isinstance(outputs, Predicted):
            metric.update(outputs.logits, outputs.labels)
        else:
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            given = outputs.outputs
            metric.update(given.get("logits") if isinstance(given, Mapping) else given, labels)
