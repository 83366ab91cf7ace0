"""Evaluate on every sample once, without side effects on training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hocket.basics import seeding
from hocket.basics.losses import Loss
from hocket.basics.time import Interval, time_of
from hocket.data.adapters import adapt, prepared
from hocket.data.batches import unpadded
from hocket.data.checks import check_sets
from hocket.data.source import Source, empty, limited, one_epoch
from hocket.data.training_iterator import ENDLESS, iterates_once
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket.help.arguments import understood
from hocket.loop import inferred_weights
from hocket.loop.modes import eval_mode
from hocket.loop.weighing import on_device
from hocket.state import conversions, scalars
from hocket.state.known_weights import KnownWeights
from hocket.state.loss_divisors import LossWatch
from hocket.state.metrics import MetricSet, named_loss
from hocket.state.state import State
from hocket.state.step import count
from hocket.state.task import Task

if TYPE_CHECKING:
    from hocket.basics.types import MetricsLike
    from hocket.loop.settings import Metrics, Settings
    from hocket.state.substates import EvaluationSet


class EvalSet:
    """Evaluation data with its own metrics and interval.

    Args:
        data: any iterable of batches.
        metrics: by name; None for the Trainer's ``metrics``.
        every: an interval such as ``"500ba"``; ``"0ba"`` for only on request; None for the Trainer's ``eval_every``.

    Example:
        >>> import hocket, torch
        >>> validation = [(torch.randn(8, 4), torch.randn(8, 1))]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), device="cpu",
        ...     eval_data={"validation": hocket.EvalSet(validation, every="500ba"), "train-subset": validation},
        ... )
        >>> sorted(trainer.evaluate())
        ['train-subset/loss', 'validation/loss']
    """

    @understood
    def __init__(
        self, data: Iterable[Any], metrics: MetricsLike | None = None, every: str | Interval | None = None
    ) -> None:
        self.data = data
        self.metrics = conversions.metrics(metrics)
        # An Interval may be of a subclass with a `due` of its own.
        self.every = every if isinstance(every, Interval | None) else Interval(time_of(every, "every"))


#: One evaluation set, or several by label.
EvalData = Iterable[Any] | EvalSet | Mapping[str, Iterable[Any] | EvalSet]


class PreparedSet:
    """An evaluation set prepared for one run: this rank's slices of the data, its own metrics, and defaults filled in."""

    def __init__(
        self, given: EvalSet, label: str, state: State, metrics: Metrics, every: Interval, limit: float | None
    ) -> None:
        self.data = given.data
        self.source: Source = adapt(prepared(given.data, state.bus.prepare_data, False), given=given.data)
        self.metrics = MetricSet(label, metrics if given.metrics is None else given.metrics, state)
        state.aggregates.reserve({f"{label}/loss": f"the loss of '{label}'", **self.metrics.reserved})
        self.every = every if given.every is None else given.every
        self.limit = limited(self.source, limit, "limit_eval")
        if isinstance(given.data, ENDLESS) and self.limit is None:
            raise WrongValue(
                f"The evaluation set '{label}' ({type(given.data).__name__}) never ends. Pass data that does, or limit it: "
                "limit_eval=100."
            )
        #: What is known of the weights of losses.
        self._known = KnownWeights()
        #: Whether a weight that is not an integer was checked.
        self._checked = False
        #: Samples of the first batch; None once a batch of another size was seen and the loss was checked.
        self._samples: int | None = 0

    def weighted(self, state: State, label: str, loss: Loss, precise: torch.dtype) -> torch.Tensor:
        """Return the sum of the loss over the batch and its weight, as a vector of two numbers."""
        summed = (loss.reduction or state.loss_reduction) == "sum"
        weight = loss.weight
        if not self._checked and isinstance(weight, torch.Tensor) and weight.is_floating_point():
            self._checked = True
            inferred_weights.check_weight(state)
        if weight is None and not summed:
            weight = inferred_weights.weight(
                state, self._known, partial(inferred_weights.in_evaluation, state, loss, label)
            )
        composed = state.step.watch is not None and state.step.watch.composed
        if weight is None or (composed and not summed):
            samples = count(state, state.batch).samples
            if not summed:
                self._check(state, label, samples)
            weight = samples if weight is None else weight
        value = loss.value.to(precise)
        weight = on_device(weight, value)
        value = torch.where(weight != 0, value, 0.0)  # a mean with weight 0 is NaN
        return torch.stack([value if summed else value * weight, weight])

    def _check(self, state: State, label: str, samples: int) -> None:
        """Warn if the loss is a sum, once there are batches of different sizes."""
        if self._samples is None or not samples or state.loss_reduction is not None:
            return
        if self._samples in (0, samples):
            self._samples = samples
            return
        self._samples = None
        if inferred_weights.tried(state, samples) == "sum":
            warn(
                f"The loss of a sample given twice is twice its loss, so this is a sum over samples, and {label}/loss is "
                "neither their sum nor their mean. Pass «loss_reduction='sum'» to the Trainer, or take the mean."
            )


def prepare_sets(
    state: State, data: object, metrics: Metrics, settings: Settings, argument: str = "eval_data"
) -> dict[str, PreparedSet]:
    """Return prepared evaluation sets by label. Raises TypeError and ValueError for data that is none, and for "train"."""
    if (
        isinstance(data, list | tuple)
        and data
        and all(isinstance(label, str) and label in state.eval_sets for label in data)
    ):
        raise WrongType(
            f"{data!r} names evaluation sets and has no batches. Write evaluate() to evaluate all sets, or "
            f"evaluate({{'{data[0]}': loader}}) for one."
        )
    check_sets(data, argument)
    state.task.check_evaluation()
    named: Mapping[str, Any] = data if isinstance(data, Mapping) else {"eval": data}
    if "train" in named:
        raise WrongValue(
            "An evaluation set is labelled 'train', which is the label of the values of training, such as train/loss. Choose "
            "another label; write {'train-set': …}."
        )
    if "" in named:
        raise WrongValue(
            f"{argument} has a set without a label. Name it, as in «{argument}={{'test': …}}», for test/loss."
        )
    sets = {label: given if isinstance(given, EvalSet) else EvalSet(given) for label, given in named.items()}
    every, limit = settings.eval_every, settings.limit_eval
    result = {label: PreparedSet(given, label, state, metrics, every, limit) for label, given in sets.items()}
    if settings.fast:
        for prepared_set in result.values():
            prepared_set.every = Interval("1ep")  # also test sets that are evaluated on request only
    return result


def evaluate(
    state: State, sets: Mapping[str, EvaluationSet], between: Callable[[], None] | None = None
) -> dict[str, float]:
    """Evaluate all sets, and return their metrics as ``label/name`` and losses as ``label/loss``.

    The values are also stored in ``state.metrics`` and logged. ``between`` is called between batches, and may raise.

    The model is in eval mode meanwhile. Afterwards, and after exceptions too, the mode of each submodule, the training batch
    in ``state`` and the global random numbers are restored.
    """
    values = _evaluate_sets(state, sets, between)
    scalars.log(state, values)
    scalars.flush(state)
    return values


def evaluate_unseen(
    state: State, sets: Mapping[str, EvaluationSet], between: Callable[[], None] | None = None, limit: int | None = None
) -> dict[str, float]:
    """As `evaluate`, for weights of another time: no callback or logger is called, and no metric of the run is changed.

    Args:
        limit: the number of batches of each set, if it is less than the set's own; None for all.
    """
    metrics = dict(state.metrics)
    try:
        with state.bus.without("callbacks", "loggers"):
            return _evaluate_sets(state, sets, between, limit)
    finally:
        state.metrics.clear()
        state.metrics.update(metrics)


def _evaluate_sets(
    state: State, sets: Mapping[str, EvaluationSet], between: Callable[[], None] | None, limit: int | None = None
) -> dict[str, float]:
    bus = state.bus
    values: dict[str, float] = {}
    if state.overwrites:
        from hocket.loop.graphs import keep_gradients

        keep_gradients(state.parameters, {})
    with _training_state_preserved(state):
        bus.eval_before_all(state)
        for label, evaluated in sets.items():
            state.eval_label = label
            with state.aggregates.evaluation({}):
                bus.eval_start(state)
                values.update(new := _evaluate_set(state, label, evaluated, between, limit))
            state.metrics.update(new)
            with state.aggregates.evaluation(dict.fromkeys(new, "measured before eval_end")):
                bus.eval_end(state)
                if any(each.kind != "loggers" for each in bus.listeners("eval_end")):  # loggers are on rank 0 only
                    logged = state.aggregates.together(bus.all_gather_object(state.aggregates.mine()))
                    values.update(logged)
                    state.metrics.update(logged)
        bus.eval_after_all(state)
        state.borrowed.check_returned("eval_after_all")
    return values


def _evaluate_set(
    state: State, label: str, evaluated: EvaluationSet, between: Callable[[], None] | None, limit: int | None
) -> dict[str, float]:
    bus, step, metrics, logged = state.bus, state.step, evaluated.metrics, state.aggregates
    limits = (limit, evaluated.limit)
    metrics.reset()
    # Sums in double precision, where the device has it, make the mean exact whatever the batch size.
    precise = torch.float32 if state.device.type == "mps" else torch.float64
    sums = torch.zeros(2, dtype=precise, device=state.device)
    seen = 0
    with one_epoch(evaluated.source) as batches:
        for number, batch in enumerate(batches):
            if number in limits:
                break
            if between is not None:
                between()
            step.batch, is_real = unpadded(batch)
            seen += is_real
            logged.samples = -1 if is_real else 0
            bus.eval_batch_start(state)
            step.batch = bus.move_batch(state, step.batch)
            bus.eval_before_forward(state)
            step.outputs = bus.eval_forward(state, step.batch)
            if state.overwrites:
                from hocket.loop.graphs import copied

                step.outputs = copied(step.outputs)
            bus.eval_after_forward(state)
            if is_real and state.task.has_eval_loss(step.outputs):
                step.watch = LossWatch()
                with step.watch:
                    loss = bus.loss(state, step.outputs, step.batch)
                sums += evaluated.weighted(state, label, loss, precise)
                step.watch = None
            if is_real:
                metrics.update(step.outputs, step.batch)
            bus.eval_batch_end(state)
            state.device_kind.batch_end()
    logged.samples = None
    ranks = bus.all_gather_object((seen, logged.mine()))
    if not any(number for number, _ in ranks):
        raise empty(evaluated.data, f"The evaluation set '{label}'", "eval_data")
    total, over = bus.all_reduce(sums, "sum").tolist()
    values = metrics.compute()
    if over and f"{label}/loss" in values:
        raise WrongValue(named_loss(label))
    values = {**({f"{label}/loss": total / over} if over else {}), **values}
    values.update(logged.together([logged_on_rank for _, logged_on_rank in ranks]))
    decides = type(state.task).has_eval_loss is not Task.has_eval_loss  # and may measure in events
    if not values and not decides and not state.task.has_eval_loss(step.outputs):
        kind = type(state.task).__name__
        warn(
            f"The evaluation of '{label}' measures nothing: there are no metrics, and {kind}.has_eval_loss(outputs) is False, "
            "as it is by default for a task with eval_forward. Define has_eval_loss(self, outputs), which returns True if the "
            "loss takes the outputs of eval_forward; or pass «metrics=»."
        )
    return values


def sanity_check(
    state: State, sets: Mapping[str, EvaluationSet], batches: int, between: Callable[[], None] | None = None
) -> None:
    """Evaluate on the first ``batches`` batches of every set, and discard the results.

    Algorithms get all events, because the model may depend on them; callbacks and loggers get none. Data, metrics and
    random numbers are restored afterwards.

    Raises ValueError for an iterator, whose batches would be used up.
    """
    if not batches:
        return
    for label, evaluated in sets.items():
        if iterates_once(data := evaluated.source.data):
            raise WrongValue(
                f"«sanity_eval={batches}» would use up the first batches of the evaluation set '{label}', an iterator "
                f"({type(data).__name__}) that can be iterated once. Pass what it iterates over, such as the list or the "
                "DataLoader itself, or omit sanity_eval."
            )
    requests, logged, aggregates = state.requests.state_dict(), dict(state.logged), state.aggregates.snapshot()
    positions = {label: evaluated.source.position() for label, evaluated in sets.items()}
    try:
        with state.generators.preserved():
            evaluate_unseen(state, sets, between, batches)
    finally:
        for label, evaluated in sets.items():
            evaluated.source.close()
            evaluated.source.restore(positions[label])
            evaluated.metrics.reset()
        state.requests.load_state_dict(requests)
        state.values.logged = logged
        state.aggregates.restore(aggregates)


@contextmanager
def _training_state_preserved(state: State) -> Iterator[None]:
    label = state.eval_label
    try:
        with state.another_step(), seeding.preserved(), eval_mode(state.task), torch.no_grad():
            yield
    finally:
        state.eval_label = label
