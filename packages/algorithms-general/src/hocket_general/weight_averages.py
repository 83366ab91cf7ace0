"""What averages of the weights have in common: copies of the model's tensors, and their use for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.basics.dtensors import shard_like
from hocket.basics.plugin_errors import PlanError
from hocket.basics.time import Interval, Time, Unit
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.span import Span
from hocket.surgery import NoEffectWarning

if TYPE_CHECKING:
    from hocket.basics.timestamp import Timestamp
    from hocket.state.state import State

#: Units that advance only with training, and identically on all ranks. Seconds do not.
_UNITS = (Unit.BATCH, Unit.EPOCH, Unit.SAMPLE, Unit.TOKEN)

#: The model holds the averages from the first to the last of these events.
BORROW = (Event.EVAL_BEFORE_ALL, Event.PREDICT_START)
RETURN = (Event.EVAL_AFTER_ALL, Event.PREDICT_END, Event.EXCEPTION, Event.CLOSE)


class _OfUpdates(Span):
    """A span of updates, which follow batches: the last one comes when no batch is left."""

    def batches(self, state: State) -> range | None:
        """Return None, so that `Averages` itself explains an average without updates."""
        return None


class Averages(Algorithm):
    """The base of algorithms that evaluate and predict with averages of the weights. See `hocket_general.EMA`.

    Subclasses say which tensors have an average (:meth:`_has_average`) and how it is updated (:meth:`_move`).

    Args:
        start: the first update at or after this time copies the weights.
        update_interval: time between updates.

    Raises:
        ValueError: ``start`` is in seconds, or ``update_interval`` is not positive.

    Warns:
        NoEffectWarning: training ends after ``start`` and before the second update.
    """

    events = {Event.FIT_START, Event.EPOCH_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END, *BORROW, *RETURN}
    phase = Phase.WEIGHTS

    def __init__(self, start: str | Time, update_interval: str | Time) -> None:
        self.update_interval = positive(self, "update_interval", update_interval)
        self._span = _OfUpdates(start)
        self._interval = Interval(self.update_interval)
        self._averages: dict[str, Tensor] = {}
        self._updated: int | None = None  # time of the last update in the interval's unit; None before the start
        self._number = 0  # of updates; with the first one, the averages are copies of the weights
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (average, the model's tensor)

    # --- for subclasses

    def _has_average(self, tensor: Tensor) -> bool:
        """Whether a parameter or a buffer of the model's ``state_dict`` is averaged."""
        raise NotImplementedError

    def _move(self, now: int) -> None:
        """Update the averages of ``self._pairs``; ``now`` is the time in the interval's unit."""
        raise NotImplementedError

    # --- on events

    def match(self, event: Event, state: State) -> bool:
        """Return True, except for updates that are not due."""
        if event not in (Event.BATCH_END, Event.EPOCH_END):
            return True
        counts_epochs = self.update_interval.unit is Unit.EPOCH
        return counts_epochs is (event is Event.EPOCH_END) and self._interval.due(state.previous, state.timestamp)

    def apply(self, event: Event, state: State) -> None:
        """Update the averages, copy them into the model, or restore the training weights."""
        if event in RETURN:
            state.give_back(self)
        elif event in BORROW:
            self._borrow(state)
        elif event in (Event.FIT_START, Event.EPOCH_START):
            self._check_parameters(state.model)
            if self._updated is not None:
                self._pair(state.model)  # parameters may have become trainable
        elif event is Event.FIT_END:
            if state.elapsed() >= 1 or state.stop_reason:
                self._warn_of_too_few(state)
        else:
            self._update(state)

    def _check_parameters(self, model: nn.Module) -> None:
        odd = [name for name, each in model.named_parameters() if each.requires_grad and not is_plain(each)]
        if odd:
            raise PlanError(
                f"{type(self).__name__} averages dense parameters only, and {odd[0]} of {type(model).__name__} is sparse or "
                "quantized. Keep it dense, and convert it by to_sparse() in forward; or remove the algorithm."
            )

    def _update(self, state: State) -> None:
        now = int(state.timestamp.count(self.update_interval.unit))
        if self._updated is not None:
            self._move(now)
        elif self._span.includes(state):
            self._pair(state.model)
        else:
            return
        self._updated = now
        self._number += 1

    def _warn_of_too_few(self, state: State) -> None:
        """Warn after training if there is no average, or one of a single copy of the weights."""
        name, every = type(self).__name__, self.update_interval
        if self._updated is None and self._span.includes(state):  # a fit itself warns of a late start
            warn(f"{self._none_yet()} The model itself is evaluated.", NoEffectWarning)
        elif self._number == 1 and self._span.opens(state) is not False:
            warn(
                f"{name} averages nothing: training ended before a second update, so that it evaluates a copy of the weights "
                f"at '{self._updated}{every.unit}'. It starts with the first update after «start='{self._span.start}'», every "
                f"'{every}'. Train longer, or lower start or update_interval, to '10ba' for instance.",
                NoEffectWarning,
            )

    def _borrow(self, state: State) -> bool:
        """Copy the averages into the model. Return False if there are none, or another plug-in has its own values there."""
        if self._updated is None or state.borrower(tensor for _, tensor in tensors_of(state.model)) is not None:
            return False
        self._pair(state.model)
        state.borrow(self, ((tensor, average) for average, tensor in self._pairs))
        return True

    def _none_yet(self) -> str:
        return (
            f"{type(self).__name__} has no average yet: it starts with the first update after "
            f"«start='{self._span.start}'», every '{self.update_interval}'. Train longer, or lower start or update_interval."
        )

    def leave_out(self, start: Timestamp, end: Timestamp) -> None:
        """Do not count this time, whose training was undone, in the age of the last update."""
        if self._updated is not None:
            unit = self.update_interval.unit
            self._updated += int(end.count(unit) - start.count(unit))

    # --- the averages and the model

    def _pair(self, model: nn.Module) -> None:
        """Match averages with the model's tensors; a tensor without an average starts one with its value."""
        tensors = dict(tensors_of(model))
        self._check(tensors)
        for name, tensor in tensors.items():
            if name in self._averages:
                self._averages[name] = shard_like(self._averages[name], tensor).to(tensor.device)
            elif self._has_average(tensor):
                self._averages[name] = tensor.detach().to(_wide(tensor.dtype), copy=True)
        self._pairs = [(average, tensors[name]) for name, average in self._averages.items()]

    def _check(self, tensors: dict[str, Tensor]) -> None:
        wrong = [n for n, average in self._averages.items() if n not in tensors or tensors[n].shape != average.shape]
        if wrong:
            raise WrongValue(
                f"{type(self).__name__} holds averages that the model has no tensors for, of that name and shape: "
                f"{', '.join(wrong[:5])}{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. "
                "Pass the model that was averaged, without wrappers, or start a new average by loading the checkpoint "
                "without this algorithm's state."
            )

    def averaged(self, model: nn.Module) -> dict[str, Any]:
        """Return a ``state_dict`` of copies: averages where they exist, cast to the model's dtypes.

        Args:
            model: the model that was trained, without wrappers (``trainer.state.model``).

        Raises:
            ValueError: there is no average yet, or ``model`` is another model.

        Example:
            >>> import hocket, hocket_general, torch
            >>> ema = hocket_general.EMA(half_life="5ba")
            >>> model = torch.nn.Linear(4, 1)
            >>> trainer = hocket.Trainer(
            ...     model=model, loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
            ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10, algorithms=[ema],
            ... )
            >>> result = trainer.fit()
            >>> sorted(ema.averaged(model))
            ['bias', 'weight']
        """
        if self._updated is None:
            raise WrongValue(self._none_yet())
        tensors = dict(tensors_of(model))
        self._check(tensors)
        names = {id(tensor): name for name, tensor in tensors.items()}  # a tied weight has several keys and one name

        def value(entry: Any) -> Any:
            if not isinstance(entry, Tensor):
                return entry
            source = self._averages.get(names.get(id(entry), ""), entry)
            return source.detach().to(entry.device, entry.dtype, copy=True)

        return {key: value(entry) for key, entry in model.state_dict(keep_vars=True).items()}

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the model's names, sharded like the weights, and the time of the last update (or None)."""
        return {"averages": dict(self._averages), "updated": self._updated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load averages, full or sharded; they are compared with the model when training or evaluation starts."""
        if state_dict.keys() != {"averages", "updated"}:
            raise WrongValue(
                f"{type(self).__name__}'s state has the keys 'averages' and 'updated', but was given {sorted(state_dict)}"
            )
        self._averages = {name: average.detach().clone() for name, average in state_dict["averages"].items()}
        self._updated = state_dict["updated"]
        self._number = 0 if self._updated is None else 2  # at least; subclasses may know
        self._pairs = []


def positive(owner: Algorithm, name: str, value: str | Time) -> Time:
    """Return a time that is positive and advances only with training. Raises ValueError for another."""
    time = Time.parse(value)
    if time.unit not in _UNITS or time.value <= 0:
        raise WrongValue(
            f"{type(owner).__name__} was given {name}='{value}': give a positive number of batches, epochs, samples or tokens, "
            "such as '1000ba', '2ep', '5e4sp' or '1e6tok'."
        )
    return time


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and the buffers of the state dict by name, each once."""
    yield from model.named_parameters()
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor quantized, so that it has an average."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of at least 32 bits: half precision would round away small updates of an average."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
