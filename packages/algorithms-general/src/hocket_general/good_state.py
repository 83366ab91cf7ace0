"""A copy of a training state in the memory of the host, to which `LossSpikeGuard` rolls back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.basics.dtensors import mesh_of
from hocket.basics.plain_data import decode, encode
from hocket.basics.timestamp import Timestamp
from hocket.data.nesting import map_tensors
from hocket.data.stateful import has_state
from hocket.hookspecs import Event
from hocket.optim.learning_rate_schedules import Scheduled
from hocket_general.weight_averages import Averages

if TYPE_CHECKING:
    from hocket.hookspecs.algorithm import Algorithm
    from hocket.state.state import State


class GoodState:
    """The last good state: weights, optimizers, schedules, and the state of algorithms, precision and strategy.

    Args:
        guard: the algorithm that rolls back, whose own state is not part of the copy.
    """

    def __init__(self, guard: Algorithm) -> None:
        self._guard = guard
        #: The state as plain data, or None.
        self._copy: dict[str, Any] | None = None
        #: The GPUs whose copies may be on their way.
        self._copied_from: set[torch.device] = set()

    def __bool__(self) -> bool:
        return self._copy is not None

    @property
    def batch(self) -> int:
        """The number of batches that were trained on before the copy."""
        assert self._copy is not None
        batch: int = self._copy["at"]["batch"]
        return batch

    def take(self, state: State, history: dict[str, list[float]]) -> None:
        """Copy the state, and the guard's statistic of it."""
        bus, prepared = state.bus, state.prepared
        tree = {
            "at": {name: getattr(state.timestamp, name) for name in ("epoch", "batch", "sample", "token")},
            "model": dict(bus.model_shards(prepared)),
            "optimizers": [bus.optimizer_shards(prepared, each) for each in state.optimizers],
            "schedules": [each.state_dict() for each in state.schedules],
            "plugins": [[each.kind, each.name, each.obj.state_dict()] for each in self._others(state)],
            "history": history,
        }
        encoded = encode(tree, "the state that loss-spike-guard copies", gather=False)
        map_tensors(lambda tensor: self._copied_from.add(tensor.device) if tensor.is_cuda else None, encoded)
        self._copy = None  # its pinned memory is used again
        self._copy = map_tensors(_copied, encoded)

    def restore(self, state: State) -> dict[str, list[float]]:
        """Restore the state, except for schedules that are functions of time, and return the guard's statistic."""
        bus, prepared = state.bus, state.prepared
        tree = decode(self.saved())  # with copies of the tensors, because optimizers keep what they load
        bus.load_model_state(prepared, tree["model"])
        for optimizer, saved in zip(state.optimizers, tree["optimizers"], strict=True):
            bus.load_optimizer_state(prepared, optimizer, saved)
        for schedule, saved in zip(state.schedules, tree["schedules"], strict=True):
            if isinstance(schedule, Scheduled):
                schedule.step(state)
            else:
                schedule.load_state_dict(saved)
        others = {(each.kind, each.name): each.obj for each in self._others(state)}
        for kind, name, saved in tree["plugins"]:
            if (other := others.get((kind, name))) is None:
                continue  # the copy is from a checkpoint of a run that had it
            other.load_state_dict(saved)
            if isinstance(other, Averages):
                other.leave_out(Timestamp(**tree["at"]), state.timestamp)
            if kind == "algorithms" and Event.FIT_START in other.events:
                other.apply(Event.FIT_START, state)  # which follows loading in a run that is resumed, too
        history: dict[str, list[float]] = tree["history"]
        return history

    def saved(self) -> dict[str, Any] | None:
        """Return the copy as plain data, once it has arrived on the host."""
        for device in self._copied_from:
            torch.cuda.synchronize(device)
        self._copied_from.clear()
        return self._copy

    def load(self, saved: dict[str, Any] | None) -> None:
        """Replace the copy by one that `saved` returned."""
        self._copy = saved

    def _others(self, state: State) -> list[Any]:
        """Return the attached plug-ins whose state belongs to the weights."""
        kinds = ("algorithms", "precisions", "strategies")
        return [
            each
            for each in state.bus.attachments
            if each.kind in kinds and each.obj is not self._guard and has_state(each.obj)
        ]


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the host, to which a GPU copies while the host goes on; a shard stays on its device."""
    if mesh_of(tensor) is not None:
        return tensor.clone()
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
