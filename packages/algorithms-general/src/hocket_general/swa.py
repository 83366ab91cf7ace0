"""Stochastic weight averaging: the mean of the weights over the last part of training, used for evaluation."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.basics import seeding
from hocket.basics.time import Time, Unit
from hocket.data.batches import unpadded
from hocket.data.stateful import has_state
from hocket.data.training_iterator import iterates_once
from hocket.errors import WrongValue
from hocket.hookspecs import Event, hookimpl
from hocket.loop.modes import eval_mode
from hocket.state.requests import Decision
from hocket.state.step import count
from hocket_general.ema import ema_update
from hocket_general.weight_averages import Averages

if TYPE_CHECKING:
    from hocket.state.state import State


def swa_update(averages: Sequence[Tensor], values: Iterable[Tensor], number: int) -> None:
    """Add values to running means in place: ``average = (number * average + value) / (number + 1)``.

    Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima", algorithm 1 (arXiv 1803.05407). Fused and without
    waiting for the device, as :func:`hocket_general.functional.ema_update`.

    Args:
        averages: tensors to change; keep those of half-precision weights in float32.
        values: tensors of the same shapes, in the same order; DTensors where the averages are, sharded identically.
        number: how many values each average is the mean of, 0 or more.

    Raises:
        ValueError: ``number`` is negative, or the sequences differ in length or in a shape.

    Example:
        >>> import torch
        >>> from hocket_general.functional import swa_update
        >>> average = torch.tensor([1.0])
        >>> for number, value in enumerate([torch.tensor([3.0]), torch.tensor([5.0])], 1):
        ...     swa_update([average], [value], number)
        >>> average
        tensor([3.])
    """
    if number < 0:
        raise WrongValue(f"number is {number}, but it counts the values in the averages: give 0 or more.")
    ema_update(averages, values, number / (number + 1))


class SWA(Averages):
    """Evaluate and predict with the mean of the weights since ``start``, while training continues at ``swa_lr``.

    Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization" (arXiv 1803.05407). Weights
    are averaged in at least float32; buffers follow the model. For an evaluation or a prediction, and at the end of each
    fit, the averages are copied into the model and the training weights are restored bitwise afterwards, as `EMA` does.

    Batch-norm statistics of the averaged weights are neither those of the training weights nor their mean; they are computed
    by a forward pass over the training data before the first evaluation after each update, and at the end of a fit, with
    everything but batch norm in eval mode. It sees the batches of training: ``batch_transform``, ``limit_train``, ``overfit``
    and ``global_batch`` act, algorithms do not. Afterwards position, random numbers and training data are as before.
    Checkpoints contain the statistics once they are computed. Models without batch norm need no such pass.

    Args:
        start: the average starts as a copy of the weights at the first update at or after this time.
        update_interval: time between updates, in ba, ep, sp or tok.
        swa_lr: the learning rate from ``start`` on, of all parameter groups, in place of the schedule; None to leave learning
            rates to the schedule.
        anneal: the time, from ``start`` on, in which the learning rate moves from its value to ``swa_lr``: a fraction of the
            duration such as ``"0.05dur"``, or a time in ba, ep, sp or tok.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        statistics_batches: the number of training batches that batch-norm statistics are computed over; None for an epoch.

    Raises:
        ValueError: an argument is out of its range; later, if batch-norm statistics are needed and there is no training data,
            or data that cannot be iterated a second time; or loaded averages do not fit the model.

    Warns:
        NoEffectWarning: training ends before the second update: a run of one epoch needs a shorter ``update_interval``.

    Example:
        >>> import hocket, hocket_general, torch
        >>> swa = hocket_general.SWA(start="0.5dur", swa_lr=0.05)
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="4ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10, algorithms=[swa],
        ... )
        >>> result = trainer.fit()
        >>> averages = swa.averaged(trainer.state.model)
    """

    events = {*Averages.events, Event.BATCH_START}

    def __init__(
        self,
        start: str | Time = "0.75dur",
        update_interval: str | Time = "1ep",
        swa_lr: float | None = None,
        anneal: str | Time = "0.05dur",
        anneal_strategy: Literal["cos", "linear"] = "cos",
        statistics_batches: int | None = None,
    ) -> None:
        super().__init__(start, update_interval)
        if swa_lr is not None and not swa_lr >= 0:
            raise WrongValue(
                f"SWA was given «swa_lr={swa_lr}», but a learning rate is not negative: give one such as 0.05."
            )
        if anneal_strategy not in ("cos", "linear"):
            raise WrongValue(f"SWA was given «anneal_strategy={anneal_strategy!r}»: give 'cos' or 'linear'.")
        if statistics_batches is not None and statistics_batches < 1:
            raise WrongValue(
                f"SWA was given «statistics_batches={statistics_batches}»: give 1 or more, or «None» for an epoch."
            )
        self.swa_lr = swa_lr
        self.anneal = Time.parse(anneal)
        if self.anneal.unit is Unit.SECOND or self.anneal.value < 0:
            raise WrongValue(
                f"SWA was given «anneal='{anneal}'»: give a fraction of the duration such as '0.05dur', or batches, epochs, "
                "samples or tokens, 0 or more."
            )
        self.anneal_strategy = anneal_strategy
        self.statistics_batches = statistics_batches
        #: When the learning rate began to move, in the unit of `anneal`, and the learning rates then, by optimizer and group.
        self._annealed_from: float | None = None
        self._rates: list[list[Any]] = []
        #: The names of the batch norms in train mode at the last update, and their statistics under the averages by name of
        #: the buffer; None until they are computed.
        self._norms: list[str] = []
        self._statistics: dict[str, Tensor] | None = None

    # --- on events

    def apply(self, event: Event, state: State) -> None:
        """Update the averages, set learning rates, or copy averages and statistics into the model."""
        if event is Event.BATCH_START:
            self._set_rates(state)  # a schedule that acts after an epoch or an evaluation has set others
            return
        if event is Event.FIT_END and self._statistics is None and self._norms:
            self._borrow(state)
            state.give_back(self)
        if event is Event.FIT_START:
            self._check_data(state)
        super().apply(event, state)

    @hookimpl(wrapper=True)
    def schedule_step(self, state: State) -> Generator[None, bool, bool]:
        """Replace the learning rates of the schedule by those of the average."""
        done = yield
        self._set_rates(state)
        return done

    def _has_average(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and tensor.requires_grad

    def _move(self, now: int) -> None:
        swa_update([average for average, _ in self._pairs], [tensor for _, tensor in self._pairs], self._number)

    def _update(self, state: State) -> None:
        before = self._updated
        super()._update(state)
        if self._updated != before:
            self._norms = [name for name, _ in _batch_norms(state.model, training=True)]
            self._statistics = None

    # --- learning rates

    def _set_rates(self, state: State) -> None:
        if self.swa_lr is None or (self._annealed_from is None and not self._span.includes(state)):
            return
        groups = [optimizer.param_groups for optimizer in state.optimizers]
        now = state.completed(self.anneal.unit)
        if self._annealed_from is None:
            self._annealed_from = now
            self._rates = [[copy.deepcopy(group["lr"]) for group in each] for each in groups]
        # A second fit may lengthen the duration, so that a fraction of it lies in the future again.
        done = min(max((now - self._annealed_from) / self.anneal.value, 0.0), 1.0) if self.anneal.value else 1.0
        kept = 1 - done if self.anneal_strategy == "linear" else (1 + math.cos(math.pi * done)) / 2
        for each, rates in zip(groups, self._rates, strict=True):
            for group, rate in zip(each, rates, strict=True):
                new = self.swa_lr + kept * (rate - self.swa_lr)
                if isinstance(group["lr"], Tensor):  # compiled and captured optimizers keep the rate on the device
                    group["lr"].copy_(new)
                else:
                    group["lr"] = new

    # --- batch-norm statistics

    def _borrow(self, state: State) -> bool:
        if not super()._borrow(state):
            return False
        norms = {name: module for name, module in _batch_norms(state.model) if name in self._norms}
        if not norms:
            return True
        buffers = {
            f"{name}.{key}".lstrip("."): getattr(norm, key)
            for name, norm in norms.items()
            for key in ("running_mean", "running_var", "num_batches_tracked")
            if getattr(norm, key) is not None
        }
        state.borrow(self, ((buffer, buffer.clone()) for buffer in buffers.values()))
        if self._statistics is None:
            self._statistics = self._compute(state, norms)
        for name, value in self._statistics.items():
            buffers[name].copy_(value)
        return True

    def _compute(self, state: State, norms: Mapping[str, _BatchNorm]) -> dict[str, Tensor]:
        """Return the statistics of the weights that the model has now, of all ranks' training data."""
        bus = state.bus
        if state.another_epoch is None:
            raise WrongValue(
                "SWA evaluates with averages whose batch-norm statistics were not computed yet, and computes them from the "
                "training data, which this Trainer has not made. Pass it the «train_data=» of the run; or, as with a data "
                "module, take a checkpoint that was written after an evaluation or at the end of a fit, and has the statistics."
            )
        # The Trainer's batch_transform and the task's own method act as in training; algorithms do not.
        others = [each for each in bus.attachments if each.kind in ("algorithms", "callbacks", "loggers")]
        after_dataloader = bus.compiled("after_dataloader", others)
        skips_next = Decision.SKIP_BATCH in state.requests.pending  # the next batch of training
        collected = _Statistics(norms)
        with (
            state.another_step() as step, seeding.preserved(), eval_mode(state.task), torch.no_grad(), collected,
            state.unlogged(), state.another_epoch() as batches,
        ):  # fmt: skip
            for step.batch, counts in itertools.islice(batches, self.statistics_batches):
                after_dataloader(state)
                batch, counts = step.batch, counts and (skips_next or not state.requests.take(Decision.SKIP_BATCH))
                parts = [batch] if state.microbatch is None else bus.split_batch(state, batch, state.microbatch)
                for part, real in map(unpadded, parts):
                    collected.samples = count(state, part).samples if counts and real else 0
                    step.batch = bus.move_batch(state, part)
                    bus.eval_forward(state, step.batch)
        result: dict[str, Tensor] = {}
        for name, (samples, latest) in collected.means.items():
            total = bus.all_reduce(
                torch.cat([latest.double().cpu().flatten() * samples, torch.tensor([samples]).double()]), "sum"
            )
            if total[-1]:
                mean, variance = (total[:-1] / total[-1]).float().view(2, -1)
                place = f"{name}." if name else ""
                result |= {f"{place}running_mean": mean, f"{place}running_var": variance}
        return result

    def _check_data(self, state: State) -> None:
        """Raise ValueError if statistics are needed that the training data cannot give."""
        if not any(_batch_norms(state.model, training=True)):
            return
        data = state.train_data
        kind, data_set = type(data).__name__, getattr(data, "dataset", None)
        advice = "Pass data that can be iterated at any time, such as a list or a DataLoader over a map-style data set."
        if iterates_once(data) or has_state(data) or has_state(data_set):
            raise WrongValue(
                f"SWA computes batch-norm statistics in a second iteration over the training data, but that of {kind} would "
                f"disturb the training's. {advice}"
            )
        if self.statistics_batches is None and state.epoch_length is None:
            raise WrongValue(
                f"SWA computes batch-norm statistics over an epoch, but {kind} does not say how long one is. Give "
                "«statistics_batches=200», for instance."
            )

    def averaged(self, model: nn.Module) -> dict[str, Any]:
        """Return a ``state_dict`` of copies: the averages with their batch-norm statistics, cast to the model's dtypes.

        Args:
            model: the model that was trained, without wrappers (``trainer.state.model``).

        Raises:
            ValueError: there is no average yet, ``model`` is another model, or statistics have not been computed since the
                last update: they are at the end of a fit and before an evaluation.
        """
        if self._updated is not None and self._norms and self._statistics is None:
            raise WrongValue(
                "SWA has not computed the batch-norm statistics of its latest averages yet. Call averaged(model) after the fit "
                "or an evaluation, or write trainer.model_state_dict(evaluated=True), which computes them."
            )
        state = super().averaged(model)
        for name, value in (self._statistics or {}).items():
            state[name] = value.to(state[name].device, state[name].dtype, copy=True)
        return state

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, their batch-norm statistics, and where the learning rate began to move."""
        return {
            **super().state_dict(),
            "number": self._number,
            "annealed_from": self._annealed_from,
            "rates": copy.deepcopy(self._rates),
            "norms": list(self._norms),
            "statistics": None if self._statistics is None else dict(self._statistics),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load them; the averages are compared with the model when training or evaluation starts."""
        own = dict(state_dict)
        if own.keys() != self.state_dict().keys():
            raise WrongValue(f"SWA's state has the keys {sorted(self.state_dict())}, but was given {sorted(own)}")
        number, self._annealed_from, self._rates = own.pop("number"), own.pop("annealed_from"), own.pop("rates")
        self._norms, self._statistics = own.pop("norms"), own.pop("statistics")
        super().load_state_dict(own)
        self._number = number


def _batch_norms(model: nn.Module, training: bool = False) -> list[tuple[str, _BatchNorm]]:
    """Return the batch norms with running statistics by name; ``training``: those in train mode."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and (module.training or not training)
    ]


class _Statistics:
    """Collect the mean and the unbiased variance of the inputs of batch norms, which are in train mode inside ``with``.

    Batches are weighted by ``samples``, the number of samples that the next forward pass has.
    """

    def __init__(self, norms: Mapping[str, _BatchNorm]) -> None:
        self._norms = norms
        self.samples = 0
        #: By name: the samples so far, and means over them of both, ``(2, F)``. All ranks have all names.
        self.means = {name: (0, torch.zeros(2, norm.num_features)) for name, norm in norms.items()}

    def __enter__(self) -> None:
        self._handles = [
            norm.register_forward_pre_hook(functools.partial(self._add, name)) for name, norm in self._norms.items()
        ]
        for norm in self._norms.values():
            norm.training = True

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        for norm in self._norms.values():
            norm.training = False

    def _add(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.samples:
            x = inputs[0]
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            variance, mean = torch.var_mean(wide, [dim for dim in range(x.dim()) if dim != 1])
            before, means = self.means[name]
            total = before + self.samples
            self.means[name] = total, torch.lerp(means.to(mean), torch.stack([mean, variance]), self.samples / total)
