"""The state of a run: the mutable object that every plug-in reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hocket.errors import WrongType, WrongValue
from hocket.help import attributes, logged as help_logged
from hocket.history import Recorder
from hocket.plugins.errors import PlanError, PluginError
from hocket.plugins.kinds import singular
from hocket.time import Time, Unit
from hocket.timestamp import Timestamp
from hocket.training import scalars
from hocket.training.aggregates import Aggregates, Over
from hocket.training.borrowing import BorrowedTensors
from hocket.training.generators import Generators
from hocket.training.progress import Progress
from hocket.training.requests import Decision, Requests
from hocket.training.step import Step
from hocket.training.watching import WatchedValues

if TYPE_CHECKING:
    from hocket.component import Content
    from hocket.devices import Device
    from hocket.hookspecs.precision import PrecisionLike
    from hocket.hookspecs.strategies import StrategyLike
    from hocket.losses import Reduction
    from hocket.optim.learning_rate import LearningRate
    from hocket.plugins.bus import Bus
    from hocket.plugins.spec import Attachment
    from hocket.run_folder import Run, RunFolder
    from hocket.surgery import Replacement
    from hocket.task import Task
    from hocket.training.accumulators import Reduce
    from hocket.training.evaluate import PreparedSet
    from hocket.types import Batch


@attributes.elsewhere(
    "epoch", "current_epoch", "global_step", "step_number", "batch_idx", "batch_index", "lr", "learning_rate", "trainer",
    "optimizer", "logger", "log_dict", "stop", "should_stop", "stop_training", "callback_metrics", "logged_metrics",
    "output", "predictions", "logits", "train_dataloader", "dataloader",
)  # fmt: skip
class State:
    """The state of a run: model, optimizers, progress and the current batch.

    Algorithms may replace ``model``'s submodules, ``batch``, ``outputs`` and ``loss`` on the events that document it;
    callbacks and loggers only read. Only the loop writes all other attributes; make requests to it with :meth:`request`.

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
        #: The task that is trained, which defines its batches and its loss.
        self.task = task
        #: The module that the step calls: ``task``, as the strategy prepared it.
        self.prepared: nn.Module = task
        self.bus = bus
        self.strategy = strategy
        self.precision = precision
        #: The device of this rank, and its kind.
        self.device = device
        self.device_kind = device_kind
        #: The identity of the run; a resumed run has that of the run it continues.
        self.run = run
        self.seed = seed
        #: Whether results of the model have to be copied to be kept; see `hocket.training.graphs`.
        self.overwrites = False
        #: Samples per microbatch of this rank, or None for the full batch.
        self.microbatch = microbatch

        #: All parameters whose gradients a step computes, whether in an optimizer or not.
        self.parameters: list[nn.Parameter] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        #: The names of the optimizers, in the same order: given by the user, else numbers.
        self.optimizer_names: list[str] = []
        self.schedules: list[LearningRate] = []
        #: Kind and threshold of gradient clipping, or None.
        self.clipping: tuple[Literal["norm", "value", "adaptive"], float] | None = None
        #: Replacements by surgery so far; algorithms append to it, so that optimizers are updated.
        self.replacements: list[Replacement] = []
        #: The training data as the user gave it, and as this rank iterates it.
        self.train_data: Any = None
        self.train_loader: Any = None
        #: Returns the data set's indices of the samples in the batch that was loaded last on this rank, or None if unknown.
        self.sample_indices: Callable[[], list[Any] | None] = lambda: None
        #: Says whether no batch of training follows the latest in its epoch; see `TrainingIterator.is_last`.
        self.is_last_batch: Callable[[], bool] = lambda: False
        #: Enters an epoch of the training data beside that of training, and yields an iterator over its batches on this rank,
        #: before any event, each with whether it counts (see `hocket.data.batches.unpadded`); None without training data.
        self.another_epoch: Callable[[], AbstractContextManager[Iterator[tuple[Any, bool]]]] | None = None
        #: Evaluation sets by label.
        self.eval_sets: dict[str, PreparedSet] = {}

        #: The parts of the state: counters and time, the current batch and its results, requests and generators of plug-ins.
        #: Plug-ins read them by flat names: ``state.timestamp``, ``state.batch`` … and call ``state.request(…)``.
        self.progress = Progress()
        self.step = Step()
        self.requests = Requests()
        self.generators = Generators(seed)
        #: Tensors of the model whose values plug-ins have replaced temporarily.
        self.borrowed = BorrowedTensors()

        #: Whether losses that do not declare it are means or sums; None for means, which is checked.
        self.loss_reduction: Reduction | None = None

        #: The latest evaluation results, as ``label/name``.
        self.metrics: dict[str, float] = attributes.Values()
        #: The label of the current evaluation set.
        self.eval_label: str | None = None
        #: The exception that is propagating out of fit, evaluate or predict.
        self.exception: BaseException | None = None
        #: Values logged since the last logging interval ended: numbers, and scalar tensors still on their device.
        self.logged: dict[str, float | Tensor] = {}
        #: Values logged with a reduction, until the end of their interval, epoch or evaluation set.
        self.aggregates = Aggregates(self)
        #: All values that were passed to the loggers so far, for `hocket.Result.history`.
        self.history = Recorder()
        #: Logged values that plug-ins act on, such as early stopping.
        self.watched = WatchedValues()

        #: The resolved configuration file of the run, as text, if the command line started it.
        self.config: str | None = None
        #: The Trainer's ``resume`` argument.
        self.resumes: str | Path | None = resumes
        #: The path or URL of the checkpoint that the run resumed from, until its first fit has shown it.
        self.resumed_from: str | None = None
        #: The content of this run's checkpoints; the Trainer sets it before ``before_load``.
        self.content: Content

        #: The folder of this run, which is created when `run_folder` is first read.
        self.folder = folder

    # --- the model

    @property
    def model(self) -> nn.Module:
        """The module given by the user, which algorithms operate on."""
        return self.task.model

    @model.setter
    def model(self, module: nn.Module) -> None:
        if self.task.model is self.task is not module:
            raise WrongType(
                f"{type(self.task).__name__} is a Task and cannot be replaced as a whole; replace its submodules."
            )
        self.task.model = module

    @property
    def model_prefix(self) -> str:
        """The prefix of the model's weights among the names of the task's weights, such as ``"network."``."""
        return next((f"{name}." for name, module in self.task.named_modules() if module is self.model and name), "")

    @property
    def step_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers of the current step: all of them, unless `hocket.Task.train_batch` named some."""
        return self.optimizers if self.step.optimizers is None else self.step.optimizers

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the optimizers of the current step, in their order."""
        return [p for optimizer in self.step_optimizers for group in optimizer.param_groups for p in group["params"]]

    # --- the current batch; see `Step`

    @property
    def batch(self) -> Any:
        """The current batch or microbatch, on the CPU or the device, as documented by each event."""
        return self.step.batch

    @batch.setter
    def batch(self, batch: Batch) -> None:
        self.step.batch = batch

    @property
    def outputs(self) -> Any:
        """The outputs of the model for ``batch``."""
        return self.step.outputs

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self.step.outputs = outputs

    @property
    def loss(self) -> Tensor | None:
        """The mean loss of the current microbatch, with its graph; from after_train_batch on, of the full batch, detached."""
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
        """The norm of the gradients before clipping, a scalar on the device, or None if it was not computed."""
        return self.step.gradient_norm

    @gradient_norm.setter
    def gradient_norm(self, norm: Tensor | None) -> None:
        self.step.gradient_norm = norm

    @property
    def batch_samples(self) -> int:
        """Number of samples in the current batch, over all ranks."""
        return self.step.counts.samples

    @property
    def batch_tokens(self) -> int:
        """Number of tokens in the current batch, over all ranks."""
        return self.step.counts.tokens

    @property
    def rank_samples(self) -> int:
        """Number of samples in the current batch that this rank trains on; 0 for a padding batch."""
        return self.step.samples

    @contextmanager
    def another_step(self) -> Iterator[Step]:
        """Use another `Step` inside the context, such as for an evaluation batch, and restore the previous one afterwards."""
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
        """Batches per epoch, or None as long as it is unknown."""
        return self.progress.epoch_length

    def elapsed(self) -> float:
        """Return the completed fraction of ``max_duration``, 0.0 to 1.0, by batch.

        In a duration of epochs it advances by epoch, after a warning, while the length of an epoch is unknown.
        """
        return self.progress.elapsed()

    def completed(self, unit: Unit) -> float:
        """Return the time since the beginning in a unit, as a number that advances by batch.

        Of epochs, the fraction of the current one is included if the length of an epoch is known; ``dur`` is :meth:`elapsed`.
        """
        if unit is Unit.DURATION:
            return self.elapsed()
        count = float(self.timestamp.count(unit))
        if unit is Unit.EPOCH and self.epoch_length:
            count += min(self.timestamp.batch_in_epoch / self.epoch_length, 1.0)
        return count

    # --- requests to the loop

    def request(self, decision: Decision, reason: str = "") -> None:
        """Request an action of the loop. It acts at the next possible point; requests are combined over plug-ins and ranks.

        Example:
            >>> import hocket
            >>> class Deadline(hocket.Callback):
            ...     def batch_end(self, state):
            ...         if state.timestamp.seconds > 3600:
            ...             state.request(hocket.Decision.CHECKPOINT | hocket.Decision.STOP, reason="the hour is over")
        """
        self.requests.add(decision, reason)

    def request_microbatch(self, samples: int) -> None:
        """Request microbatches of this many samples from the next batch on. Loss and gradient do not depend on it."""
        if samples < 1:
            raise WrongValue(f"A microbatch holds at least one sample, not {samples}.")
        self.microbatch = samples

    def request_steps(self, steps: int) -> None:
        """Request so many optimizer steps on the current batch, each on a part of it; call it until batch_start is over.

        Sizes of parts differ by at most one sample on each rank. A batch of fewer samples gets one step for each, with a
        warning. The batch still counts as one in ``state.timestamp``. The events from before_train_batch to after_train_batch
        happen once for each step. All ranks have to request the same number. The last request for a batch counts.

        Raises:
            ValueError: it is less than 1.
            PlanError: the task takes its own steps in `hocket.Task.train_batch`.
        """
        if steps < 1:
            raise WrongValue(f"A batch is trained on in at least one step, not {steps}.")
        if steps > 1 and self.task.owns_steps:
            raise PlanError(
                f"{type(self.task).__name__} takes its own steps in train_batch, so a plug-in cannot divide its batches into "
                "parts. Call step(…) there for each part, or remove the plug-in that asks for several steps."
            )
        self.step.parts = steps

    @property
    def stop_reason(self) -> str:
        """The reason given by plug-ins that requested a stop, or empty."""
        return self.requests.reason

    # --- temporary values of the model's tensors

    def borrow(self, plugin: Any, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Replace values of the model's tensors until `give_back`; call it on ``eval_before_all`` or ``predict_start``.

        Args:
            plugin: the algorithm or callback that borrows the tensors.
            values: pairs of a tensor of the model and its new value, which is a shard (DTensor) if the tensor is one.

        Raises:
            ConflictError: another plug-in has borrowed one of these tensors; the message names both.
        """
        self.borrowed.borrow(self._called(plugin), values)

    def give_back(self, plugin: Any) -> None:
        """Restore the training values; call it on ``eval_after_all``, ``predict_end``, ``exception`` and ``close``.

        Does nothing if this plug-in has not borrowed any tensors.
        """
        self.borrowed.give_back(self._called(plugin))

    def borrower(self, tensors: Iterable[Tensor]) -> str | None:
        """Return the plug-in that has borrowed one of these tensors, such as ``"algorithm 'ema'"``, or None."""
        return self.borrowed.borrower(tensors)

    def _called(self, plugin: Any) -> str:
        attachment = self.attachment_of(plugin)
        return f"{singular(attachment.kind)} '{attachment.name}'"

    # --- randomness

    def generator(self, plugin: Any, *, per_rank: bool = False) -> torch.Generator:
        """Return the plug-in's private generator, on the CPU. For a given seed it does not depend on other plug-ins.

        Its numbers are identical on all ranks, unless ``per_rank``: then they differ between ranks with different data.
        Without a seed it starts from torch's global seed.
        """
        attachment = self.attachment_of(plugin)
        key = f"{attachment.kind}/{attachment.name}" + (f"@{self.strategy.data_rank}" if per_rank else "")
        return self.generators.of(key)

    def attachment_of(self, plugin: Any) -> Attachment:
        """Return the attachment of a plug-in: its name, distribution and configuration. Raises LookupError."""
        for attachment in self.bus.attachments:
            if attachment.obj is plugin:
                return attachment
        raise LookupError(f"{type(plugin).__name__} is not attached to this Trainer.")

    # --- logging

    def snapshot(self, bus: Callable[[Bus], Any]) -> State:
        """Return a copy for another thread: the current state without the current batch and its results.

        Args:
            bus: makes the bus of the copy from the bus of this state.
        """
        taken = copy.copy(self)
        taken.progress, taken.metrics = self.progress.copy(), dict(self.metrics)
        taken.step, taken.logged = self.step.without_batch(), {}
        taken.bus = bus(self.bus)
        return taken

    def log(
        self,
        values: Mapping[str, Any],
        *more: Any,
        reduce: Reduce = "last",
        over: Over = "interval",
        weight: float | Tensor | None = None,
    ) -> None:
        """Log values by name. Scalar tensors stay on their device until the logging interval ends.

        Without further arguments the last value of an interval counts, as rank 0 has it; a fit ends with a warning about names
        that only other ranks have logged. Otherwise values are reduced over everything that is logged in the interval, on all
        ranks, in double precision. Early stopping, ``best=`` of checkpoints and the schedule ``plateau`` find the value by its
        name.

        Args:
            values: numbers, scalar tensors, or metrics (objects with ``update``, ``compute`` and ``reset``) that the caller
                updates.
            more: nothing; a name and a value apart are refused.
            reduce: ``"mean"``, ``"sum"``, ``"min"``, ``"max"``, ``"last"``; ``"metric"`` for metrics. Padding does not count.
            over: ``"interval"``; ``"epoch"``, logged as ``train/name``; or both as a tuple. In an evaluation a reduction is
                over the set, logged as ``label/name``; values without one are logged by their own name.
            weight: of a mean; by default the number of samples of the current microbatch or batch on this rank, and 1 between
                batches.

        Raises:
            TypeError: a value is not a single number, or a name not a text.
            ValueError: the reduction is unknown, or the name is that of something else, such as a loss.

        Example:
            >>> import hocket
            >>> class WeightNorm(hocket.Callback):
            ...     def batch_end(self, state):
            ...         norms = [parameter.detach().norm() for parameter in state.trained_parameters()]
            ...         state.log({"weights/largest_norm": max(norms)})
            ...     def after_loss(self, state):
            ...         state.log({"loss/largest": state.loss}, reduce="max", over=("interval", "epoch"))
        """
        if more or (type(values) is not dict and not isinstance(values, Mapping)):
            raise help_logged.unnamed((values, *more))
        if reduce != "last" or over != "interval" or weight is not None:
            self.aggregates.log(values, reduce, over, weight)
            return
        if not self.aggregates.plain.issuperset(values):
            self.aggregates.claim(values)
        for name, value in values.items():
            if type(value) is not float:
                scalars.checked(name, value)
        scalars.log(self, values)

    def unlogged(self) -> AbstractContextManager[None]:
        """Return a context in which `hocket.Task.log` and reductions of `log` count nothing.

        For passes that are not part of training or evaluation, such as one that scores samples.
        """
        return self.aggregates.ignored()

    @property
    def run_name(self) -> str:
        """The name of the run and of its folder."""
        return self.run.name

    @property
    def run_folder(self) -> Path:
        """The exclusive folder of this run, created on first access. Raises RunFolderError if another run owns it."""
        return self.folder.claim()


def by_own_names(state: State, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights by the model's own names instead of the task's.

    Raises PluginError if the strategy uses other names.
    """
    prefix = state.model_prefix
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if missing := set(state.model.state_dict()) - set(own):
        raise PluginError(
            f"The strategy's model_state has no {', '.join(sorted(missing)[:3])}: it has to use the model's own names, "
            f"but has {', '.join(list(weights)[:3])}."
        )
    return own
