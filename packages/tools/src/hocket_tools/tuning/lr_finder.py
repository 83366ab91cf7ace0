"""Find a learning rate: a range test says where the model learns, and short runs at constant rates which one is best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from hocket.errors import WrongValue
from hocket_tools.arguments import check_least, check_weights
from hocket_tools.tuning import plotting, range_test
from hocket_tools.tuning.trial import EndOfTrial, Progress, loss_of, take_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.optim import Optimizer

    from hocket.run.trainer import Trainer
    from hocket.state.state import State

#: A search looks at batches until the optimizer has stepped, if it does not step in every one; at most so many for a step.
_BATCHES_PER_STEP = 20
#: The factors between the rates of short runs: first 10**(1/2), then 10**(1/4). There are at most so many runs.
_FACTOR, _MOST_RUNS = math.sqrt(10), 12


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A suggested learning rate of one optimizer, and why."""

    #: The name of the optimizer; "0" for an unnamed one.
    optimizer: str
    #: The learning rate to write; None if the search did not find one.
    suggestion: float | None
    reason: str
    #: The learning rate that it was made with.
    current: float
    #: The range test: each learning rate, and the loss of the next batch after a step with it.
    table: tuple[tuple[float, float], ...]
    #: What ended the range test.
    ended: str
    #: Short runs at constant rates, and their mean loss in the second half of the steps; infinite after a divergence.
    runs: tuple[tuple[float, float], ...] = ()
    #: Samples of the batches that it was searched with, on all ranks: another batch size needs another learning rate.
    batch: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return plain data, with None for infinity."""
        losses = {"table": self.table, "runs": self.runs}
        plain = {
            name: [[rate, loss if math.isfinite(loss) else None] for rate, loss in pairs]
            for name, pairs in losses.items()
        }
        return {**asdict(self), **plain}

    def __str__(self) -> str:
        if self.suggestion is None:
            return f"no learning rate\n  because {self.reason}"
        found = f"{self.suggestion:.2g} for batches of {self.batch} (now {self.current:.2g})"
        return f"learning rate: {found}\n  because {self.reason}"

    def figure(self) -> Figure:
        """Return a figure of matplotlib with losses by learning rate. Raises ImportError without matplotlib."""
        return plotting.figure([self])


class LearningRates(tuple[LearningRate, ...]):
    """The suggestions for all optimizers, in their order.

    Example:
        >>> import hocket, hocket_tools, torch
        >>> data = [(torch.ones(8, 1), torch.zeros(8, 1))] * 4
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(1, 1), loss="mse_loss", optimizer="sgd(lr=1e-4)", train_data=data, device="cpu"
        ... )
        >>> rate = hocket_tools.tune(trainer, "lr").suggestion  # the loss is a parabola of curvature 4 along (1, 1)
        >>> 1 / 4 / 3 < rate < 3 / 4
        True
    """

    __slots__ = ()

    @property
    def suggestion(self) -> float | None:
        """The learning rate of the only optimizer. Raises ValueError if there are several."""
        if len(self) != 1:
            names = ", ".join(repr(each.optimizer) for each in self)
            raise WrongValue(
                f"There are several optimizers, {names}. Read the suggestion of each: result[0].suggestion."
            )
        return self[0].suggestion

    def __str__(self) -> str:
        if len(self) == 1:
            return str(self[0])
        return "\n".join(f"optimizer {each.optimizer}, {each}" for each in self)

    def figure(self) -> Figure:
        """Return a figure of matplotlib with a chart for each optimizer. Raises ImportError without matplotlib."""
        return plotting.figure(self)


def check_range(low: float = 1e-7, high: float = 1e3, steps: int = 100, run_steps: int = 40) -> None:
    """Raise WrongValue for rates that are no range, and for too few steps."""
    if not 0 < low < high:
        raise WrongValue(
            f"«low={low:g}, high={high:g}» is not a range of learning rates. Write «low=1e-7, high=1000.0»."
        )
    check_least(20, 100, steps=steps)
    check_least(5, 40, run_steps=run_steps or 5)  # 0 for none


def find(trainer: Trainer, *, low: float, high: float, steps: int, run_steps: int, progress: Progress) -> LearningRates:
    """Return a suggestion for each optimizer; see `hocket_tools.tune`."""
    check_range(low, high, steps, run_steps)
    return LearningRates(
        _Search(trainer, index, progress).result(range_test.rates(low, high, steps), run_steps)
        for index in range(len(trainer.state.optimizers))
    )


class _Search:
    """The search for the learning rate of one optimizer. The others keep the rates that they were made with."""

    def __init__(self, trainer: Trainer, index: int, progress: Progress) -> None:
        self._trainer, self._index, self._progress = trainer, index, progress
        state = trainer.state
        self.name = state.optimizer_names[index]
        self._label = f"optimizer {self.name}: " if len(state.optimizers) > 1 else ""
        self._base = [_initial(group, self.name) for group in state.optimizers[index].param_groups]
        self.current, self._batch = max(self._base), 0

    def result(self, rates: Sequence[float], run_steps: int) -> LearningRate:
        losses, why = self._losses(rates, "range test")
        table = tuple(zip(rates, losses[1:], strict=False))
        ended = why or "the range ended"
        if not table:
            check_weights(self._trainer.state.model)
            reason = (
                f"the loss or the gradients of step {len(losses) + 1} are NaN or infinite, although the learning rate was "
                f"{rates[0]:.2g}. Train with callbacks=['nan-monitor'], which names the first module with such values"
            )
            return self._found(None, reason, (), "that step")
        after = [loss for _, loss in table]
        found = range_test.between(after)
        if found is None:
            reason = (
                f"the loss did not fall below its noise at any rate from {rates[0]:.2g} to {table[-1][0]:.2g}, where {ended}. "
                "Search with more steps or larger batches, and before the model is trained; and check that the loss depends on "
                "its outputs"
            )
            return self._found(None, reason, table, ended)
        half, last = (table[step][0] for step in found)
        where = f"in the range test the loss had fallen by half at {half:.2g} and rose again after {last:.2g}"
        middle = math.sqrt(half * last)
        if not run_steps:
            return self._found(middle, f"{where}; this is the geometric mean", table, ended)
        runs = _descend(middle, lambda rate: self._run(rate, run_steps))
        means = tuple((rate, statistics.fmean(losses)) for rate, losses in sorted(runs.items()))
        best, lowest = min(means, key=lambda run: run[1])
        if not math.isfinite(lowest):
            reason = f"{where}, but all short runs diverged. Omit them, by run_steps=0, or search with more steps"
            return self._found(None, reason, table, ended)
        equal = [rate for rate in sorted(runs) if range_test.equal(runs[rate], runs[best])]
        which = f"this had the lowest mean loss in the second half, {lowest:.4g}"
        if len(equal) > 1:
            which = (
                f"those from {equal[0]:.2g} to {equal[-1]:.2g} had, but for noise, the same lowest mean loss in the second "
                f"half, {lowest:.4g}; this is the geometric mean"
            )
        reason = f"{where}; of {len(runs)} short runs of {run_steps} steps, {which}"
        return self._found(math.sqrt(equal[0] * equal[-1]), reason, table, ended, means)

    def _found(self, rate: float | None, reason: str, table: Any, ended: str, runs: Any = ()) -> LearningRate:
        rounded = None if rate is None else float(f"{rate:.2g}")
        return LearningRate(self.name, rounded, reason, self.current, table, ended, runs, self._batch)

    def _run(self, rate: float, steps: int) -> list[float]:
        """Return the losses in the second half of a run at a constant rate; infinity if it diverges."""
        losses, why = self._losses([rate] * steps, f"run at {rate:.2g}")
        return [math.inf] if why else losses[-max(steps // 2, 1) :]

    def _losses(self, rates: Sequence[float], what: str) -> tuple[list[float], str]:
        """Take a step with each rate. Return the loss before each step, and after the last; and why it ended before."""
        losses: list[float] = []

        def hooks(state: State) -> Mapping[str, Callable[..., Any]]:
            step_optimizer, mine = state.bus.step_optimizer, state.optimizers[self._index]

            def stepped(optimizer: Optimizer, closure: Any) -> Any:
                if optimizer is mine:
                    losses.append(loss_of(state))
                    self._batch = max(self._batch, state.batch_samples)
                    if len(losses) > len(rates):
                        raise EndOfTrial
                    if range_test.diverges(losses):
                        raise EndOfTrial("the loss diverged")
                    self._progress(f"{self._label}{what}, step", len(losses), len(rates))
                    self._set(optimizer, rates[len(losses) - 1])
                else:
                    self._keep(state, optimizer)
                return step_optimizer(optimizer, closure)

            return {"step_optimizer": stepped}

        why = take_steps(self._trainer, (len(rates) + 1) * _BATCHES_PER_STEP, hooks)
        if not losses and not why:
            raise WrongValue(
                f"Optimizer {self.name!r} did not step in {(len(rates) + 1) * _BATCHES_PER_STEP} batches, so that no learning "
                "rate can be tried. Tune it by hand, or with `hocket sweep`."
            )
        return losses, why

    def _set(self, optimizer: Optimizer, rate: float) -> None:
        """Set the rate of the group with the highest one, and those of the others in proportion."""
        for group, base in zip(optimizer.param_groups, self._base, strict=True):
            _set(group, rate * base / self.current if self.current else rate)

    def _keep(self, state: State, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            _set(group, _initial(group, state.optimizer_names[state.optimizers.index(optimizer)]))


def _initial(group: dict[str, Any], name: str) -> float:
    """Return the learning rate that a group was made with: schedules have changed it, and may have made it 0."""
    rate = group.get("initial_lr", group.get("lr"))
    if rate is None:
        raise WrongValue(
            f"Optimizer {name!r} has a parameter group without a learning rate, so that there is none to find. Give it one, "
            "such as «optimizer='adamw(lr=1e-3)'»."
        )
    return float(rate)


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _descend(middle: float, run: Callable[[float], list[float]]) -> dict[float, list[float]]:
    """Run at rates around ``middle``, in the direction of lower losses, until there is a minimum. Return losses by rate."""
    runs: dict[int, list[float]] = {}  # by the exponent, in quarters of a decade

    def at(quarters: int) -> float:
        if quarters not in runs:
            runs[quarters] = run(middle * 10 ** (quarters / 4))
        return statistics.fmean(runs[quarters])

    best = 0
    for width in (2, 1):
        at(best)
        while len(runs) < _MOST_RUNS:
            lower = min((best - width, best + width), key=at)
            # What diverges has equal losses, and lower rates are the way out.
            if math.isinf(at(best)):
                lower = best - width
            elif at(lower) >= at(best):
                break
            best = lower
    return {middle * 10 ** (quarters / 4): loss for quarters, loss in runs.items()}
