"""The state: the one mutable score that every plug-in reads."""

from __future__ import annotations

import copy
import enum
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hocket.time import Time, Timestamp, Unit
from hocket.training.step import Step

if TYPE_CHECKING:
    from hocket.devices import Device
    from hocket.optim.learning_rate import LearningRate
    from hocket.plugins.bus import Bus
    from hocket.plugins.spec import Voice
    from hocket.precision import Precision
    from hocket.run_folder import Run, RunFolder
    from hocket.strategies import Strategy
    from hocket.surgery import Replacement
    from hocket.task import Task
    from hocket.training.evaluate import PreparedSet


class Decision(enum.Flag):
    """What a plug-in may ask of the loop. Requests of all plug-ins and ranks are combined: one is enough."""

    NOTHING = 0
    STOP = enum.auto()  # end this fit after the batch (or epoch) under way
    SKIP_BATCH = enum.auto()  # do not train on this batch; heard until batch_start is over
    EVALUATE = enum.auto()  # evaluate after this batch
    CHECKPOINT = enum.auto()  # write a checkpoint after this batch


@dataclass(slots=True)
class Progress:
    """How far the batches of the whole run have come; an exception leaves the counters where they were.

    ``ready``: handed out by the loader. ``started``: batch_start is over. ``processed``: the optimizer has stepped, or the
    batch was skipped. ``completed``: batch_checkpoint is over.
    """

    ready: int = 0
    started: int = 0
    processed: int = 0
    completed: int = 0


class State:
    """What is trained, with what, how far it is, and the batch under way.

    Algorithms may replace ``model``'s submodules, ``batch``, ``outputs`` and ``loss`` on the events that say so; callbacks
    and loggers read. Nobody but the loop writes the rest: ask for things with :meth:`request`.
    """

    def __init__(
        self,
        *,
        task: Task,
        bus: Bus,
        strategy: Strategy,
        precision: Precision,
        device: torch.device,
        device_kind: Device,
        run: Run,
        folder: RunFolder,
        seed: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        #: What is trained: knows its batches and its loss.
        self.task = task
        #: The module that the step calls: ``task``, as the strategy prepared it.
        self.prepared: nn.Module = task
        self.bus = bus
        self.strategy = strategy
        self.precision = precision
        #: The device this rank computes on, and its kind.
        self.device = device
        self.device_kind = device_kind
        #: Which run this is; a resumed one is the run that it continues.
        self.run = run
        self.seed = seed
        #: Samples per microbatch of this rank, or None for the whole batch.
        self.microbatch = microbatch

        #: Everything whose gradients a step computes, whether an optimizer holds it or not.
        self.parameters: list[nn.Parameter] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedules: list[LearningRate] = []
        #: Kind and threshold of gradient clipping, or None.
        self.clipping: tuple[Literal["norm", "value", "adaptive"], float] | None = None
        #: What surgery replaced so far; algorithms add to it, so that optimizers are repaired.
        self.replacements: list[Replacement] = []
        #: The training data as the user gave it, and as this rank iterates it.
        self.train_data: Any = None
        self.train_loader: Any = None
        #: Evaluation sets by label.
        self.eval_sets: dict[str, PreparedSet] = {}

        #: Completed epochs, batches, samples, tokens and seconds; ``previous`` is one batch (or epoch) earlier.
        self.timestamp = Timestamp()
        self.previous = Timestamp()
        self.progress = Progress()
        #: The planned length of training, counted from its beginning: what schedules and :meth:`elapsed` refer to.
        self.max_duration: Time | None = None
        #: When the fit under way ends, counted from the beginning of training.
        self.fit_until: Time | None = None
        #: Batches per epoch, once that is known.
        self.epoch_length: int | None = None

        #: The batch under way and what came of it; its parts are there under names of their own, too: ``state.batch`` …
        self.step = Step()
        #: Whether losses are means or sums, where they do not say; None for means, which is checked.
        self.loss_reduction: Literal["mean", "sum"] | None = None

        #: The latest value of everything that was evaluated, as ``label/name``.
        self.metrics: dict[str, float] = {}
        #: The evaluation set under way.
        self.eval_label: str | None = None
        #: What is leaving fit, evaluate or predict.
        self.exception: BaseException | None = None
        #: What was logged since the last logging interval ended: numbers, and scalar tensors still on their device.
        self.logged: dict[str, float | Tensor] = {}

        #: What was requested and not yet acted upon.
        self.requested = Decision.NOTHING

        #: The folder of this run, which is made when `run_folder` is first asked for.
        self.folder = folder
        self._reasons: list[str] = []
        self._generators: dict[str, torch.Generator] = {}

    # --- the model

    @property
    def model(self) -> nn.Module:
        """What algorithms operate on: the module that the user gave."""
        return self.task.model

    @model.setter
    def model(self, module: nn.Module) -> None:
        self.task.model = module

    @property
    def model_prefix(self) -> str:
        """What the names of the model's weights begin with among those of the task, such as ``"network."``."""
        return next((f"{name}." for name, module in self.task.named_modules() if module is self.model and name), "")

    def trained_parameters(self) -> list[nn.Parameter]:
        """What the optimizers hold, in their order."""
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    # --- the batch under way; see `Step`

    @property
    def batch(self) -> Any:
        """The batch: whole, a microbatch, or on the device, as the events say."""
        return self.step.batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self.step.batch = batch

    @property
    def outputs(self) -> Any:
        """What the model returned for it."""
        return self.step.outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self.step.outputs = outputs

    @property
    def loss(self) -> Tensor | None:
        """The mean loss of the microbatch under way, with its graph; after_train_batch and later: of the batch, detached."""
        return self.step.loss

    @loss.setter
    def loss(self, loss: Tensor | None) -> None:
        self.step.loss = loss

    @property
    def loss_parts(self) -> Mapping[str, Tensor]:
        """The named losses that ``loss`` is the sum of, from after_train_batch on."""
        return self.step.losses

    @loss_parts.setter
    def loss_parts(self, losses: Mapping[str, Tensor]) -> None:
        self.step.losses = losses

    @property
    def gradient_norm(self) -> Tensor | None:
        """Norm of the gradients before clipping, where it was computed: a scalar on the device."""
        return self.step.gradient_norm

    @gradient_norm.setter
    def gradient_norm(self, norm: Tensor | None) -> None:
        self.step.gradient_norm = norm

    @property
    def batch_samples(self) -> int:
        """Samples of the batch under way, over all ranks."""
        return self.step.counts.samples

    @property
    def batch_tokens(self) -> int:
        """Tokens of the batch under way, over all ranks."""
        return self.step.counts.tokens

    @property
    def rank_samples(self) -> int:
        """Samples of it that this rank trains on; 0 where it only keeps the others company."""
        return self.step.samples

    @contextmanager
    def another_step(self) -> Iterator[Step]:
        """Inside, another batch is under way, as in an evaluation; afterwards the one before, as it was."""
        before, self.step = self.step, Step()
        try:
            yield self.step
        finally:
            self.step = before

    # --- time

    def elapsed(self) -> float:
        """The share of ``max_duration`` that is done, 0.0 to 1.0; advances every batch, whatever the unit.

        Epochs advance by batch once the length of an epoch is known: from the loader, or after the first epoch.
        """
        end = self.max_duration
        if end is None:
            raise ValueError("There is no duration outside a fit. Pass duration= to the Trainer or to fit.")
        if not end.value:
            return 1.0
        now = self.timestamp
        if end.unit is Unit.EPOCH:
            done = float(now.epoch)
            if self.epoch_length:
                done += min(now.batch_in_epoch / self.epoch_length, 1.0)
        else:
            done = float(now.get(end.unit).value)
        return min(done / end.value, 1.0)

    # --- asking the loop for something

    def request(self, decision: Decision, reason: str = "") -> None:
        """Ask the loop to act. Heard at the next place where it can: requests are combined, and agreed over ranks."""
        self.requested |= decision
        if reason:
            self._reasons.append(reason)

    def request_microbatch(self, samples: int) -> None:
        """Ask for microbatches of this many samples from the next batch on. The loss and its gradient do not depend on it."""
        if samples < 1:
            raise ValueError(f"A microbatch holds at least one sample, not {samples}.")
        self.microbatch = samples

    @property
    def stop_reason(self) -> str:
        """Why plug-ins asked to stop, or empty."""
        return "; ".join(self._reasons)

    def requests(self) -> dict[str, Any]:
        """What was requested and not yet acted upon, and why, for :meth:`load_requests`."""
        return {"decisions": [each.name for each in Decision if each in self.requested], "reasons": list(self._reasons)}

    def load_requests(self, requests: Mapping[str, Any]) -> None:
        """Undo :meth:`requests`."""
        self.requested = Decision.NOTHING
        for name in requests["decisions"]:
            self.requested |= Decision[name]
        self._reasons = list(requests["reasons"])

    def take(self, decision: Decision) -> bool:
        """For the loop: whether this was requested; forgets the request."""
        if self.requested is Decision.NOTHING or not self.requested & decision:
            return False
        self.requested &= ~decision
        if decision is Decision.STOP:
            self._reasons.clear()
        return True

    # --- randomness

    def generator(self, plugin: Any, *, per_rank: bool = False) -> torch.Generator:
        """The plug-in's own random numbers, on the CPU: the same for one seed whatever other plug-ins are attached.

        The same on every rank unless ``per_rank``: then they differ between ranks with data of their own. Without a seed they
        start from the process's torch seed.
        """
        voice = self.voice_of(plugin)
        key = f"{voice.kind}/{voice.name}" + (f"@{self.strategy.data_rank}" if per_rank else "")
        if key not in self._generators:
            seed = torch.initial_seed() if self.seed is None else self.seed
            self._generators[key] = torch.Generator().manual_seed(
                (seed * 0x9E3779B1 + zlib.crc32(key.encode())) % 2**63
            )
        return self._generators[key]

    def generator_states(self) -> dict[str, Tensor]:
        """Where the random numbers of plug-ins are on this rank."""
        return {key: generator.get_state() for key, generator in self._generators.items()}

    def load_generator_states(self, states: Mapping[str, Tensor]) -> None:
        """Undo :meth:`generator_states`; who holds a generator already finds it changed."""
        for key, state in states.items():
            self._generators.setdefault(key, torch.Generator()).set_state(state)

    @contextmanager
    def generators_preserved(self) -> Iterator[None]:
        """Whatever plug-ins draw inside, their random numbers are afterwards as before."""
        states = self.generator_states()
        try:
            yield
        finally:
            for key, generator in self._generators.items():
                if key in states:
                    generator.set_state(states[key])
                else:  # made inside
                    generator.manual_seed(generator.initial_seed())

    def voice_of(self, plugin: Any) -> Voice:
        """The name, distribution and configuration under which an attached plug-in goes."""
        for voice in self.bus.voices:
            if voice.obj is plugin:
                return voice
        raise LookupError(f"{type(plugin).__name__} is not attached to this Trainer.")

    # --- writing down

    def snapshot(self, bus: Callable[[Bus], Any]) -> State:
        """A copy to be read later, in another thread: as it is now, without the current batch and what came of it.

        Args:
            bus: makes the copy's bus from this one's.
        """
        taken = copy.copy(self)
        taken.timestamp, taken.previous = self.timestamp.copy(), self.previous.copy()
        taken.progress, taken.metrics = copy.copy(self.progress), dict(self.metrics)
        taken.step, taken.logged = self.step.without_batch(), {}
        taken.bus = bus(self.bus)
        return taken

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Values for the loggers, by name. Scalar tensors stay on their device until the logging interval ends; of several
        values of one name within an interval, the last counts."""
        self.logged.update(values)

    @property
    def run_name(self) -> str:
        """The run's name, which is that of its folder."""
        return self.run.name

    @property
    def run_folder(self) -> Path:
        """The folder of this run and of no other; made when it is first asked for. Raises RunFolderError if it is another's."""
        return self.folder.claim()
