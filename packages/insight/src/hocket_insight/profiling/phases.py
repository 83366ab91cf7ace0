"""Divide the wall time of a step into phases and plug-ins, by the calls that the bus measures."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hocket.hookspecs import Event

if TYPE_CHECKING:
    from hocket.hookspecs.bus import BusLike

#: The phases in the order of a step, with the words of the summary. Plug-ins come between them by name.
PHASES = {
    "data": "waiting for data",
    "move": "moving batches to the device",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer": "optimizer",
    "metrics": "training metrics",
    "plugins": "plug-ins",
    "loggers": "loggers",
    "communication": "communication between ranks",
    "synchronisation": "waiting for the device",
    "evaluation": "evaluation",
    "loop": "Python and the training loop",
}
#: The phase of each hook of actions, strategies and precisions, but for those of checkpoints.
_OF_HOOK = {
    **dict.fromkeys(["move_batch", "convert_batch"], "move"),
    **dict.fromkeys(["forward", "call_prepared", "forward_context"], "forward"),
    "loss": "loss",
    **dict.fromkeys(["backward", "scale_loss", "accumulate"], "backward"),
    **dict.fromkeys(
        ["optimizer_step", "step_optimizer", "unscale_gradients", "clip_gradients", "zero_grad", "schedule_step"],
        "optimizer",
    ),
    "overflowed": "optimizer",
    "update_metric": "metrics",
    **dict.fromkeys(
        ["all_reduce", "all_gather_object", "broadcast_object", "barrier", "reduce_gradients"], "communication"
    ),
    **dict.fromkeys(["gradients", "split_batch", "begin_step", "eval_forward"], "loop"),
    # Before and after training:
    **dict.fromkeys(["setup_environment", "prepare_model", "prepare_optimizer", "prepare_data"], "loop"),
    **dict.fromkeys(["convert_module", "check_optimizer", "resume"], "loop"),
    **dict.fromkeys(["load_model_state", "load_optimizer_state"], "loop"),
}
#: The hooks with which strategies provide the content of checkpoints, for the plug-in that writes them.
_OF_CHECKPOINTS = {"model_state", "model_shards", "optimizer_state", "optimizer_shards"}
_EVENTS = {event.value for event in Event}
#: The phases that every batch has. Others, such as an evaluation, may be in a few of them only.
_EVERY = ("data", "move", "forward", "loss", "backward", "optimizer", "metrics", "communication", "loop")
#: The least number of batches of which one is recognized as an outlier.
_MANY = 4


def phase_of(hook: str) -> str:
    """Return the phase that a hook of actions, strategies or precisions belongs to; the loop for an event."""
    return _OF_HOOK.get(hook, "loop")


class Phases:
    """The seconds of each phase and plug-in, from each `begin` to the next `end`. They add up to the wall time in between.

    Args:
        bus: measures the calls.
        without: names of plug-ins that are not listed; their time is the loop's.
    """

    def __init__(self, bus: BusLike, without: set[str]) -> None:
        self._bus, self._without = bus, without
        self.seconds: defaultdict[str, float] = defaultdict(float)
        #: By plug-in, seconds by hook.
        self.plugins: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._before: Mapping[tuple[str, str, str], float] = {}
        self._since = 0.0
        self._waits_since: float | None = None
        self._waited = 0.0
        #: The seconds of each batch.
        self._batches: list[dict[str, float]] = []

    def begin(self) -> None:
        """Begin to count."""
        self._before, self._since = self._own(), time.perf_counter()
        self._waits_since, self._waited = None, 0.0

    def wait(self) -> None:
        """From now on the loop waits for data."""
        self._waits_since = time.perf_counter()

    def loaded(self) -> None:
        """The data has arrived."""
        if self._waits_since is not None:
            self._waited += time.perf_counter() - self._waits_since
            self._waits_since = None

    def end(self, evaluation: bool = False) -> None:
        """Add what was measured since `begin`; all of it to evaluation if this was one."""
        self.loaded()
        wall = time.perf_counter() - self._since
        if evaluation:
            self.seconds["evaluation"] += wall
            return
        counted = self._waited
        for key, seconds in self._own().items():
            counted += self._add(*key, seconds - self._before.get(key, 0.0))
        self.seconds["data"] += self._waited
        self.seconds["loop"] += max(wall - counted, 0.0)

    def next_batch(self) -> None:
        """A batch is complete."""
        before = {phase: sum(each.get(phase, 0.0) for each in self._batches) for phase in self.seconds}
        self._batches.append({phase: seconds - before[phase] for phase, seconds in self.seconds.items()})

    def without_outliers(self) -> tuple[float, dict[str, float]]:
        """Count in each phase its slowest batch as its second slowest, such as where another process took the processor.

        Returns the seconds that this removed, and the fraction that is left of each phase.
        """
        removed, left = 0.0, {}
        if len(self._batches) >= _MANY:
            for phase in _EVERY:
                *_, second, slowest = sorted(each.get(phase, 0.0) for each in self._batches)
                if self.seconds[phase] > 0:
                    left[phase] = 1 - (slowest - second) / self.seconds[phase]
                    self.seconds[phase] -= slowest - second
                    removed += slowest - second
        return removed, left

    def shift(self, phase: str, plugin: str, to: str, seconds: float) -> None:
        """Count seconds of a phase, and of a plug-in in it, as those of another phase; at most all that there are."""
        if plugin:
            hooks = self.plugins[plugin]
            hook = max(hooks, key=lambda each: hooks[each], default="")
            seconds = min(seconds, hooks[hook])
            hooks[hook] -= seconds
        seconds = min(seconds, self.seconds[phase])
        self.seconds[phase] -= seconds
        self.seconds[to] += seconds

    def kind_of(self, plugin: str) -> str:
        """Return the kind of an attached plug-in."""
        return next((each.kind for each in self._bus.attachments if each.name == plugin), "callbacks")

    def of_plugin(self, plugin: str) -> str:
        """Return the phase of an attached plug-in."""
        return "loggers" if self.kind_of(plugin) == "loggers" else "plugins"

    def _own(self) -> dict[tuple[str, str, str], float]:
        return {
            (table, *key): entry[1]
            for table, entries in (("plugin", self._bus.account), ("work", self._bus.work))
            for key, entry in entries.items()
            if key[0] not in self._without
        }

    def _add(self, table: str, name: str, hook: str, seconds: float) -> float:
        if table == "work" and hook not in _EVENTS and hook not in _OF_CHECKPOINTS:
            self.seconds[phase_of(hook)] += seconds
        elif seconds:
            name = "checkpoints" if hook in _OF_CHECKPOINTS else name
            self.plugins[name][hook] += seconds
            self.seconds[self.of_plugin(name)] += seconds
        return seconds
