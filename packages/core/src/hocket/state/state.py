"""The state of a run: the mutable object that every plug-in reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.basics.kinds import singular
from hocket.basics.plugin_errors import PlanError
from hocket.basics.seeding import Generators
from hocket.basics.swapped_tensors import BorrowedTensors
from hocket.basics.time import Time, Unit
from hocket.basics.timestamp import Timestamp
from hocket.errors import WrongType, WrongValue
from hocket.help import attributes
from hocket.state import log_names, scalars
from hocket.state.progress import Progress
from hocket.state.requests import Decision, Requests
from hocket.state.step import Step
from hocket.state.substates import Data, Identity, LoggedValues, Optimization

if TYPE_CHECKING:
    from hocket.basics.history import Recorder
    from hocket.basics.losses import Reduction
    from hocket.basics.run_folder import Run, RunFolder
    from hocket.basics.types import Batch
    from hocket.devices import Device
    from hocket.hookspecs.attachment import Attachment
    from hocket.hookspecs.bus import BusLike
    from hocket.hookspecs.precision import PrecisionLike
    from hocket.hookspecs.strategies import StrategyLike
    from hocket.state.accumulators import Over, Reduce
    from hocket.state.aggregates import Aggregates
    from hocket.state.component import Content
    from hocket.state.substates import Clipping, EvaluationSet, LearningRate
    from hocket.state.task import Task
    from hocket.state.watching import WatchedValues
    from hocket.surgery import Replacement


def _part(path: str, doc: str, *, replaceable: bool = False) -> Any:
    """Return a property of the State: an attribute of one of its parts, such as ``step.batch``, without a call in Python."""
    part, _, name = path.partition(".")

    def replace(state: State, value: object) -> None:
        setattr(getattr(state, part), name, value)

    return property(attrgetter(path), replace if replaceable else None, doc=doc)


@attributes.elsewhere
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
        bus: BusLike,
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
        #: Whether results of the model have to be copied to be kept; see `hocket.loop.graphs`.
        self.overwrites = False
        #: Samples per microbatch of this rank, or None for the full batch.
        self.microbatch = microbatch
        #: The label of the current evaluation set.
        self.eval_label: str | None = None
        #: The exception that is propagating out of fit, evaluate or predict.
        self.exception: BaseException | None = None
        #: The content of this run's checkpoints; the Trainer sets it before ``before_load``.
        self.content: Content

        # The parts of the state. Plug-ins read them by the flat names below: ``state.timestamp``, ``state.batch`` …
        self.identity = Identity(run, folder, resumes)
        self.data = Data()
        self.optimization = Optimization()
        self.progress = Progress()
        self.step = Step()
        self.requests = Requests()
        self.generators = Generators(seed)
        self.values = LoggedValues(self)
        #: Tensors of the model whose values plug-ins have replaced temporarily.
        self.borrowed = BorrowedTensors()

    # --- the run, its data, its optimization and its logged values; see `hocket.state.substates`

    run: Run = _part("identity.run", "The identity of the run; a resumed run has that of the run it continues.")
    run_name: str = _part("identity.run.name", "The name of the run and of its folder.")
    folder: RunFolder = _part("identity.folder", "The folder of this run, created when ``run_folder`` is read.")
    seed: int | None = _part("generators.seed", "The run's seed, or None.")
    train_data: Any = _part("data.train_data", "The training data as the user gave it.")
    train_loader: Any = _part("data.train_loader", "The training data as this rank iterates it.")
    eval_sets: Mapping[str, EvaluationSet] = _part("data.eval_sets", "Evaluation sets by label.")
    sample_indices: Callable[[], list[Any] | None] = _part(
        "data.sample_indices", "Return the data set's indices of the samples in this rank's latest batch, if known."
    )
    is_last_batch: Callable[[], bool] = _part(
        "data.is_last_batch", "Whether the latest batch is the last of its epoch."
    )
    another_epoch: Callable[[], AbstractContextManager[Iterator[tuple[Any, bool]]]] | None = _part(
        "data.another_epoch", "Enter an epoch beside that of training, or None; see `TrainingIterator.another_epoch`."
    )
    parameters: list[nn.Parameter] = _part("optimization.parameters", "All parameters that a step has gradients of.")
    optimizers: list[torch.optim.Optimizer] = _part("optimization.optimizers", "All optimizers.")
    optimizer_names: list[str] = _part(
        "optimization.optimizer_names", "Names from the user, or numbers, in that order."
    )
    schedules: list[LearningRate] = _part("optimization.schedules", "The learning-rate schedules.")
    clipping: Clipping | None = _part("optimization.clipping", "Kind and threshold of gradient clipping, or None.")
    loss_reduction: Reduction | None = _part("optimization.loss_reduction", "What losses that do not say it are over.")
    replacements: list[Replacement] = _part(
        "optimization.replacements", "Replacements by surgery so far; algorithms append to it.", replaceable=True
    )
    metrics: dict[str, float] = _part("values.metrics", "The latest evaluation results, as ``label/name``.")
    logged: dict[str, float | Tensor] = _part("values.logged", "Values logged since the last logging interval ended.")
    aggregates: Aggregates = _part("values.aggregates", "Values logged with a reduction that are not complete yet.")
    history: Recorder = _part("values.history", "All values passed to loggers so far, for `hocket.Result.history`.")
    watched: WatchedValues = _part("values.watched", "Logged values that plug-ins act on, such as early stopping.")

    @property
    def run_folder(self) -> Path:
        """The exclusive folder of this run, created on first access. Raises RunFolderError if another run owns it."""
        return self.folder.claim()

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

    batch: Batch = _part("step.batch", "The current batch or microbatch, as each event documents.", replaceable=True)
    outputs: Any = _part("step.outputs", "The outputs of the model for ``batch``.", replaceable=True)
    loss: Tensor | None = _part(
        "step.loss",
        "The mean loss of the current microbatch, with its graph; from after_train_batch on, of the full batch, detached.",
        replaceable=True,
    )
    loss_parts: Mapping[str, Tensor] = _part("step.losses", "The named losses that ``loss`` sums up.", replaceable=True)
    gradient_norm: Tensor | None = _part("step.gradient_norm", "The norm before clipping, or None.", replaceable=True)
    batch_samples: int = _part("step.counts.samples", "Number of samples in the current batch, over all ranks.")
    batch_tokens: int = _part("step.counts.tokens", "Number of tokens in the current batch, over all ranks.")
    rank_samples: int = _part("step.samples", "Number of the batch's samples on this rank; 0 for a padding batch.")

    @contextmanager
    def another_step(self) -> Iterator[Step]:
        """Use another `Step` inside the context, such as for an evaluation batch, and restore the previous one afterwards."""
        before, self.step = self.step, Step()
        try:
            yield self.step
        finally:
            self.step = before

    # --- time

    timestamp: Timestamp = _part("progress.timestamp", "Completed epochs, batches, samples, tokens and seconds.")
    previous: Timestamp = _part("progress.previous", "The timestamp one batch (or epoch) earlier.")
    max_duration: Time | None = _part("progress.max_duration", "The planned length of training, from its beginning.")
    epoch_length: int | None = _part("progress.epoch_length", "Batches per epoch, or None as long as it is unknown.")

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
        self.step.requested_steps = steps

    stop_reason: str = _part("requests.reason", "The reason given by plug-ins that requested a stop, or empty.")

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

    def snapshot(self, bus: Callable[[BusLike], Any]) -> State:
        """Return a copy for another thread: the current state without the current batch and its results.

        Args:
            bus: makes the bus of the copy from the bus of this state.
        """
        taken = copy.copy(self)
        taken.progress, taken.step = self.progress.copy(), self.step.without_batch()
        taken.values, taken.bus = self.values.without_logged(), bus(self.bus)
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
            raise log_names.unnamed((values, *more))
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
        """Return a context in which `Task.log` and reductions of `log` count nothing.

        For passes that are not part of training or evaluation, such as one that scores samples.
        """
        return self.aggregates.ignored()
