"""The state: the one mutable score that every plug-in reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hocket.plugins.kinds import singular
from hocket.time import Time, Timestamp
from hocket.training.borrowing import BorrowedTensors
from hocket.training.generators import Generators
from hocket.training.progress import Progress
from hocket.training.requests import Decision, Requests
from hocket.training.step import Step

if TYPE_CHECKING:
    from hocket.checkpoints.content import Content
    from hocket.devices import Device
    from hocket.hookspecs import PrecisionLike, StrategyLike
    from hocket.optim.learning_rate import LearningRate
    from hocket.plugins.bus import Bus
    from hocket.plugins.spec import Attachment
    from hocket.run_folder import Run, RunFolder
    from hocket.surgery import Replacement
    from hocket.task import Task
    from hocket.training.evaluate import PreparedSet


class State:
    """What is trained, with what, how far it is, and the batch under way.

    Algorithms may replace ``model``'s submodules, ``batch``, ``outputs`` and ``loss`` on the events that say so; callbacks
    and loggers read. Nobody but the loop writes the rest: ask for things with :meth:`request`.

    Example:
        >>> import hocket
        >>> class PrintLoss(hocket.Callback):
        ...     def batch_end(self, state):
        ...         if state.timestamp.batch % 100 == 0:
        ...             print(f"batch {state.timestamp.batch}: loss {state.loss.item():.4f}")
    """

    def __init__(
        self,
        *,
        task: Task,
        bus: Bus,
        strategy: StrategyLike,
        precision: PrecisionLike,
        device: torch.device,
        device_kind: Device,
        run: Run,
        folder: RunFolder,
        seed: int | None = None,
        microbatch: int | None = None,
        resumes: str | Path | None = None,
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
        #: Their names, in the same order: those that the user gave, else numbers.
        self.optimizer_names: list[str] = []
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

        #: The parts of the state: counters and time, the current batch and its results, requests and generators of plug-ins.
        #: Plug-ins read them by flat names: ``state.timestamp``, ``state.batch`` … and call ``state.request(…)``.
        self.progress = Progress()
        self.step = Step()
        self.requests = Requests()
        self.generators = Generators(seed)
        #: Tensors of the model that plug-ins have put other values into for a while.
        self.borrowed = BorrowedTensors()

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

        #: The ``resume`` that the Trainer was given.
        self.resumes: str | Path | None = resumes
        #: What checkpoints of this run hold; the Trainer sets it before ``before_load``.
        self.content: Content

        #: The folder of this run, which is made when `run_folder` is first asked for.
        self.folder = folder

    # --- the model

    @property
    def model(self) -> nn.Module:
        """What algorithms operate on: the module that the user gave."""
        return self.task.model

    @model.setter
    def model(self, module: nn.Module) -> None:
        if self.task.model is self.task is not module:
            raise TypeError(
                f"{type(self.task).__name__} is a Task and cannot be replaced as a whole; replace its submodules."
            )
        self.task.model = module

    @property
    def model_prefix(self) -> str:
        """What the names of the model's weights begin with among those of the task, such as ``"network."``."""
        return next((f"{name}." for name, module in self.task.named_modules() if module is self.model and name), "")

    @property
    def step_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers of the current step: all of them, unless `hocket.Task.train_batch` named some."""
        return self.optimizers if self.step.optimizers is None else self.step.optimizers

    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizers of the current step hold, in their order."""
        return [p for optimizer in self.step_optimizers for group in optimizer.param_groups for p in group["params"]]

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

    @property
    def timestamp(self) -> Timestamp:
        """Completed epochs, batches, samples, tokens and seconds."""
        return self.progress.timestamp

    @property
    def previous(self) -> Timestamp:
        """The timestamp one batch (or epoch) earlier."""
        return self.progress.previous

    @property
    def max_duration(self) -> Time | None:
        """The planned length of training, counted from its beginning: what schedules and :meth:`elapsed` refer to."""
        return self.progress.max_duration

    @property
    def epoch_length(self) -> int | None:
        """Batches per epoch, once that is known."""
        return self.progress.epoch_length

    def elapsed(self) -> float:
        """The share of ``max_duration`` that is done, 0.0 to 1.0; see `Progress.elapsed`."""
        return self.progress.elapsed()

    # --- asking the loop for something

    def request(self, decision: Decision, reason: str = "") -> None:
        """Ask the loop to act. Heard at the next place where it can: requests are combined, and agreed over ranks.

        Example:
            >>> import hocket
            >>> class Deadline(hocket.Callback):
            ...     def batch_end(self, state):
            ...         if state.timestamp.seconds > 3600:
            ...             state.request(hocket.Decision.CHECKPOINT | hocket.Decision.STOP, reason="the hour is over")
        """
        self.requests.add(decision, reason)

    def request_microbatch(self, samples: int) -> None:
        """Ask for microbatches of this many samples from the next batch on. The loss and its gradient do not depend on it."""
        if samples < 1:
            raise ValueError(f"A microbatch holds at least one sample, not {samples}.")
        self.microbatch = samples

    @property
    def stop_reason(self) -> str:
        """Why plug-ins asked to stop, or empty."""
        return self.requests.reason

    # --- the model's tensors with other values for a while

    def borrow(self, plugin: Any, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Put values into the model's own tensors until `give_back`: on ``eval_before_all`` or ``predict_start``.

        Args:
            plugin: the algorithm or callback that borrows.
            values: each of the model's tensors with the value to put there; shards (DTensors) where the model's are.

        Raises:
            ConflictError: another plug-in has borrowed one of these tensors; the message names both.
        """
        self.borrowed.borrow(self._called(plugin), values)

    def give_back(self, plugin: Any) -> None:
        """Put the training values back: on ``eval_after_all``, ``predict_end``, ``exception`` and ``close``.

        Does nothing if this plug-in has borrowed nothing.
        """
        self.borrowed.give_back(self._called(plugin))

    def borrower(self, tensors: Iterable[Tensor]) -> str | None:
        """Return who has borrowed one of these tensors, such as ``"algorithm 'ema'"``, or None."""
        return self.borrowed.borrower(tensors)

    def _called(self, plugin: Any) -> str:
        attachment = self.attachment_of(plugin)
        return f"{singular(attachment.kind)} '{attachment.name}'"

    # --- randomness

    def generator(self, plugin: Any, *, per_rank: bool = False) -> torch.Generator:
        """The plug-in's own random numbers, on the CPU: the same for one seed whatever other plug-ins are attached.

        The same on every rank unless ``per_rank``: then they differ between ranks with data of their own. Without a seed they
        start from the process's torch seed.
        """
        attachment = self.attachment_of(plugin)
        key = f"{attachment.kind}/{attachment.name}" + (f"@{self.strategy.data_rank}" if per_rank else "")
        return self.generators.of(key)

    def attachment_of(self, plugin: Any) -> Attachment:
        """The name, distribution and configuration under which an attached plug-in goes."""
        for attachment in self.bus.attachments:
            if attachment.obj is plugin:
                return attachment
        raise LookupError(f"{type(plugin).__name__} is not attached to this Trainer.")

    # --- writing down

    def snapshot(self, bus: Callable[[Bus], Any]) -> State:
        """A copy to be read later, in another thread: as it is now, without the current batch and what came of it.

        Args:
            bus: makes the copy's bus from this one's.
        """
        taken = copy.copy(self)
        taken.progress, taken.metrics = self.progress.copy(), dict(self.metrics)
        taken.step, taken.logged = self.step.without_batch(), {}
        taken.bus = bus(self.bus)
        return taken

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Values for the loggers, by name. Scalar tensors stay on their device until the logging interval ends; of several
        values of one name within an interval, the last counts.

        Example:
            >>> import hocket
            >>> class WeightNorm(hocket.Callback):
            ...     def batch_end(self, state):
            ...         norms = [parameter.detach().norm() for parameter in state.trained_parameters()]
            ...         state.log({"weights/largest_norm": max(norms)})
        """
        self.logged.update(values)

    @property
    def run_name(self) -> str:
        """The run's name, which is that of its folder."""
        return self.run.name

    @property
    def run_folder(self) -> Path:
        """The folder of this run and of no other; made when it is first asked for. Raises RunFolderError if it is another's."""
        return self.folder.claim()
