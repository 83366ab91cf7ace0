"""Warn of state that training changes and no checkpoint holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.basics.kinds import singular
from hocket.data.stateful import has_state
from hocket.help import warn
from hocket.help.ours import is_ours
from hocket.state.state import State
from hocket.state.task import Task
from hocket_checkpoints.components.nonpersistent import known, roots, saves_itself
from hocket_checkpoints.weight_differences import some


class UnsavedState:
    """Warn once, at a save, of values that have changed since training began and that no checkpoint holds.

    Values that the first batch makes, such as the caches of rotary embeddings, count from then on.
    """

    def __init__(self) -> None:
        #: Fingerprints by name and occurrence, before the first batch and then after it.
        self._known: dict[tuple[str, int], Any] | None = None
        self._observed = False
        #: The number of saves so far; of many, only some are checked.
        self._saves = 0
        self._done = False

    def begin(self, state: State) -> None:
        """Note all values before the first batch."""
        if self._known is None and state.strategy.rank == 0:
            self._known = _values(state)

    def observe(self, state: State) -> None:
        """Note what the first batch has made; later calls do nothing."""
        if self._observed or self._known is None:
            return
        from hocket_checkpoints.reachable_state import Size

        self._observed = True
        for key, value in _values(state).items():
            before = self._known.get(key)
            if before is None or (
                isinstance(before, tuple) and before[0] is Size
            ):  # collections, too, are caches that the first batch fills
                self._known[key] = value

    def warn(self, state: State) -> None:
        """Warn, once, of values that have changed. Looks at the first saves, and then at ever fewer."""
        from hocket_checkpoints.reachable_state import same

        self._saves += 1
        if self._done or self._known is None or self._saves & (self._saves - 1):
            return
        now, before = _values(state), self._known
        names = [
            key[0].removesuffix("{}") for key, value in now.items() if key not in before or not same(value, before[key])
        ]
        names = [name for name in names if not name.startswith(tuple(f"{each}[" for each in names))]
        if changed := list(dict.fromkeys(names)):
            self._done = True
            it = "it" if len(changed) == 1 else "them"
            advice = dict.fromkeys(_advice(name, it, state) for name in changed)
            warn(
                f"{some(changed)} changed in training, and no checkpoint holds {it}: a resumed run begins without the "
                f"change. If a later batch needs {it}, {'; or '.join(advice)}. If not, set {it} to None after the batch, or "
                "ignore this."
            )


def _advice(name: str, it: str, state: State) -> str:
    """Return what keeps ``it`` in checkpoints, by the place of the name."""
    place = name.partition(".")[0].partition("[")[0]
    if place == type(state.task).__name__:
        return f"return {it} from {place}.extra_state() and restore {it} in load_extra_state(state)"
    if place == type(state.model).__name__:
        return f"use register_buffer() in {place} for a tensor, or define get_extra_state() and set_extra_state(state)"
    if place == "train_data":
        return "define state_dict() and load_state_dict(state) in the data set"
    if name.startswith(("loss.", "batch_transform.", "callback '", "algorithm '")):
        return f"define state_dict() and load_state_dict(state) in the class of {place}"
    return f"keep {it} in an object that defines state_dict() and load_state_dict(state)"


def _values(state: State) -> dict[tuple[str, int], Any]:
    """Return the fingerprints of all values that checkpoints do not save; None for None."""
    from hocket_checkpoints.reachable_state import fingerprint

    times: Counter[str] = Counter()
    found = {}
    for name, value in _leaves(state):
        times[name] += 1
        found[name, times[name]] = None if value is None else fingerprint(value)
    return found


def _leaves(state: State) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of everything that computes a batch, by name.

    A Task that defines an extra state answers for all of itself.
    """
    from hocket_checkpoints.reachable_state import Size, walk

    def enter(name: str, value: Any) -> bool:
        told = hasattr(type(value), "set_epoch") and not is_ours(type(value).__module__)  # in a resumed run too
        return isinstance(value, nn.Module) or not (saves_itself(value) or told)

    answers = type(state.task).extra_state is not Task.extra_state
    computing = [(name, each) for name, each in roots(state) if not (answers and isinstance(each, nn.Module))]
    observing: list[tuple[str, Any]] = []
    for each in state.bus.attachments:
        if each.kind in ("algorithms", "callbacks") and not hasattr(each.obj, "checkpoint_components"):
            (computing if each.kind == "algorithms" else observing).append(
                (f"{singular(each.kind)} '{each.name}'", each.obj)
            )
    observing += [(type(each).__name__, _own_attributes(each)) for each in state.optimizers]
    data = {f"train_data.{name}": getattr(state.train_data, name, None) for name in ("dataset", "collate_fn")}
    observing += [(name, each) for name, each in data.items() if not has_state(each)]
    saved = known(state) | {id(state.train_data), *(id(each.state) for each in state.optimizers)}
    yield from walk(computing, saved, enter)
    # Callbacks collect what they have seen, and data sets samples that they have read: these lists are no state of training.
    for name, value in walk(observing, saved, enter):
        if not isinstance(value, Size | str) and not name.endswith(("]", "}")):
            yield name, value


def _own_attributes(optimizer: Optimizer) -> Any:
    """Return the attributes of an optimizer that its ``state_dict`` does not hold."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return None
    common = {*vars(Optimizer([nn.Parameter(torch.empty(0))], {})), "_opt_called", "_step_count"}
    return SimpleNamespace(**{name: each for name, each in vars(optimizer).items() if name not in common})
