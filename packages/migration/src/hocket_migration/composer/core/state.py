"""Composer's state of a run: a view of hocket's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import hocket
from hocket import Timestamp as Position
from hocket.data.items import get_item, set_item
from hocket.errors import Unsupported, WrongState, WrongValue
from hocket.run.content import by_own_names
from hocket_migration.composer.core.event import Event
from hocket_migration.composer.core.precision import Precision
from hocket_migration.composer.core.time import Time, Timestamp
from hocket_migration.composer.devices import Device, device_named
from hocket_migration.composer.utils.helpers import is_model_ddp

if TYPE_CHECKING:
    from hocket_migration.composer.core.evaluator import Evaluator
    from hocket_migration.composer.loggers.logger import Logger
    from hocket_migration.composer.task import ComposerTask


class State:
    """The state of a run by Composer's names, for algorithms, callbacks, schedulers and scripts.

    What it reads and replaces is hocket's state: ``batch``, ``outputs`` and ``loss`` may be assigned, on the events that
    allow it. Other attributes may be assigned freely; they are kept, and mean nothing to hocket. hocket's own state, for more,
    is ``state.hocket``.

    Example:
        >>> from hocket_migration.composer import Algorithm, Event
        >>> class HalveLoss(Algorithm):
        ...     def match(self, event, state):
        ...         return event == Event.AFTER_LOSS and state.timestamp.batch >= 10
        ...     def apply(self, event, state, logger):
        ...         state.loss = state.loss / 2
    """

    def __init__(self, task: ComposerTask, optimizers: Sequence[torch.optim.Optimizer], precision: Precision) -> None:
        self._task, self._given_optimizers, self._precision = task, list(optimizers), precision
        self._hocket: hocket.State | None = None
        self._position: Position | None = None
        #: The Trainer's arguments of these names.
        self.algorithms: list[Any] = []
        self.callbacks: list[Any] = []
        self.evaluators: list[Evaluator] = []
        self.schedulers: list[Any] = []
        self.train_dataloader: Any = None
        self.logger: Logger
        self._planned: Time | None = None
        #: The position in the current or latest evaluation, and prediction.
        self.eval_timestamp, self.predict_timestamp = Timestamp(), Timestamp()
        #: Whether `Trainer.eval` runs.
        self.standalone = False

    def happens(self, event: Event) -> bool:
        """Whether an event of hocket's happens in Composer: in ``trainer.eval()`` those around all sets do not."""
        return not (self.standalone and event in (Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL))

    def bind(self, state: hocket.State) -> State:
        """Make this a view of a state of hocket's."""
        self._hocket = state
        return self

    @property
    def hocket(self) -> hocket.State:
        """hocket's state. Raises RuntimeError before there is a Trainer."""
        if self._hocket is None:
            raise WrongState("There is no run yet: the state can be read from the first event (INIT) on.")
        return self._hocket

    # --- the model and the batch

    @property
    def model(self) -> Any:
        """The ComposerModel."""
        return self._task.model

    @model.setter
    def model(self, module: nn.Module) -> None:
        self._task.model = module

    @property
    def batch(self) -> Any:
        """The current batch or microbatch."""
        return self.hocket.batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self.hocket.batch = batch

    @property
    def outputs(self) -> Any:
        """What the model returned."""
        return self.hocket.outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self.hocket.outputs = outputs

    @property
    def loss(self) -> Any:
        """The loss of the current microbatch; after the batch, of the batch."""
        return self.hocket.loss

    @loss.setter
    def loss(self, loss: torch.Tensor) -> None:
        self.hocket.loss = loss

    @property
    def total_loss_dict(self) -> dict[str, float]:
        """The loss of the batch by its logged name, and the losses that it is the sum of."""
        named = {f"loss/train/{name}": value.item() for name, value in self.hocket.loss_parts.items()}
        return named if self.loss is None else {**named, "loss/train/total": self.loss.item()}

    def batch_get_item(self, key: Any) -> Any:
        """Return the part of the batch at an index, a key or an attribute, or what a function of the batch returns."""
        if isinstance(key, tuple) and len(key) == 2 and all(map(callable, key)):
            key = key[0]
        return key(self.batch) if callable(key) else get_item(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace the part of the batch at an index, a key or an attribute, or by the second function of a pair."""
        if isinstance(key, tuple) and len(key) == 2 and all(map(callable, key)):
            self.batch = key[1](self.batch, value)
        else:
            self.batch = set_item(self.batch, key, value)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        made = [] if self._hocket is None else self._hocket.optimizers
        return list(made) or self._given_optimizers

    # --- time

    @property
    def timestamp(self) -> Timestamp:
        """The position of the run."""
        return Timestamp(self.hocket.timestamp if self._position is None else self._position)

    @property
    def previous_timestamp(self) -> Timestamp:
        """The position one batch, or epoch, earlier."""
        return Timestamp(self.hocket.previous)

    @contextmanager
    def at(self, position: Position) -> Iterator[State]:
        """Inside the context, ``timestamp`` is this position."""
        self._position = position
        try:
            yield self
        finally:
            self._position = None

    @property
    def max_duration(self) -> Time | None:
        """The planned length of training."""
        planned = None if self._hocket is None else self._hocket.max_duration
        return self._planned if planned is None else Time.from_timestring(str(planned))

    @max_duration.setter
    def max_duration(self, duration: Time | str | None) -> None:
        """End the fit, for a duration that is over; raises ValueError for another one."""
        time = None if duration is None else Time.from_input(duration, "ep")
        if time is None or self.timestamp < time:
            raise WrongValue(
                f"max_duration={duration!r} cannot be set during a run. Pass it to the Trainer, or fit(duration=…)."
            )
        self.stop_training()

    def get_elapsed_duration(self) -> Time | None:
        """Return the completed fraction of the duration. Unlike Composer's, it advances by batch in durations of epochs too."""
        return None if self.max_duration is None else Time(self.hocket.elapsed(), "dur")

    def stop_training(self) -> None:
        """End the fit after the current batch."""
        self.hocket.request(hocket.Decision.STOP, reason="stop_training() was called")

    # --- data, metrics and the rest

    @property
    def dataloader(self) -> Any:
        """The data that is being iterated: of training, or of the evaluation set."""
        label = self.hocket.eval_label
        return self.train_dataloader if label is None else self.hocket.eval_sets[label].data

    @property
    def dataloader_label(self) -> str:
        """The label of the evaluation set, or ``"train"``."""
        return self.hocket.eval_label or "train"

    @property
    def dataloader_len(self) -> Time | None:
        """Batches in an epoch of training; None if unknown."""
        length = self.hocket.epoch_length
        return None if length is None else Time(length, "ba")

    @property
    def train_metrics(self) -> Mapping[str, Any]:
        """The metrics over the current epoch of training."""
        return self._task.made.get("train", {})

    @property
    def eval_metrics(self) -> dict[str, Mapping[str, Any]]:
        """The metrics by evaluation set, as of its last evaluation."""
        return {label: metrics for label, metrics in self._task.made.items() if label != "train"}

    @property
    def train_metric_values(self) -> dict[str, torch.Tensor]:
        """The values of the last epoch by the metric's name."""
        return self._values(("train",))

    @property
    def eval_metric_values(self) -> dict[str, torch.Tensor]:
        """The values of the last evaluation by the metric's name; of several sets' metrics of one name, the last set's."""
        return self._values(self.eval_metrics)

    def _values(self, labels: Any) -> dict[str, torch.Tensor]:
        found = {}
        for name, value in self.hocket.metrics.items():
            label, _, metric = name.partition("/")
            if label in labels and metric in self._task.made[label]:
                found[metric] = torch.tensor(value)
        return found

    @property
    def precision(self) -> Precision:
        """The precision."""
        return self._precision

    @property
    def device(self) -> Device:
        """The device of this rank."""
        return device_named(self.hocket.device.type)

    @property
    def device_train_microbatch_size(self) -> int | None:
        """Samples per forward pass: of the full batch, those that the loader states; None if it states none."""
        return self.hocket.microbatch or getattr(self.train_dataloader, "batch_size", None)

    @property
    def seed(self) -> int | None:
        """The seed of the run."""
        return self.hocket.seed

    rank_zero_seed = seed

    @property
    def run_name(self) -> str:
        """The name of the run."""
        return self.hocket.run_name

    # --- for checkpoints

    @property
    def is_model_ddp(self) -> bool:
        """Whether the model is wrapped by torch's DistributedDataParallel."""
        return is_model_ddp(self.hocket.prepared)

    def get_model_state_dict(self) -> dict[str, Any]:
        """Return the full weights by name, on every rank."""
        return by_own_names(self.hocket, self.hocket.bus.model_state(self.hocket.prepared))

    def get_optim_state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer under the name of its class, by the names of the weights."""
        return {type(each).__name__: self._named(each) for each in self.optimizers}

    def _named(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        order = [names[each] for group in optimizer.param_groups for each in group["params"]]
        tree = optimizer.state_dict()
        groups = [{**group, "params": [order[index] for index in group["params"]]} for group in tree["param_groups"]]
        return {"state": {order[index]: each for index, each in tree["state"].items()}, "param_groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run as a checkpoint of Composer's holds it, which ``load_path`` takes as a file.

        ``torch.save({"state": state.state_dict()}, path)`` writes one. It has weights, optimizer, schedulers and position;
        `Trainer.save_checkpoint` writes a file with the state of algorithms and callbacks and of random numbers too.
        """
        return {
            "model": self.get_model_state_dict(),
            "optimizers": self.get_optim_state_dict(),
            "schedulers": {f"{number}": each.state_dict() for number, each in enumerate(self.schedulers)},
            "timestamp": {"Timestamp": self.timestamp.state_dict()},
            "rank_zero_seed": self.seed,
            "run_name": self.run_name,
        }

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Refuse: the Trainer loads."""
        raise Unsupported("state.load_state_dict is not available. Pass load_path= to the Trainer.")

    @property
    def fsdp_enabled(self) -> bool:
        """Whether ranks hold shards of the weights."""
        return hocket.Need.FULL_PARAMETERS not in self.hocket.strategy.offers
