"""Tests for every plug-in that takes part in a run."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

import hocket
from hocket.basics.plugin_errors import PlanError
from hocket.hookspecs import Event
from hocket.hookspecs.events import between
from hocket.loggers.memory import MemoryLogger
from hocket_testkit.compare import difference
from hocket_testkit.conformance import Planned, contents, raiser, weights
from hocket_testkit.exceptions import Exceptions
from hocket_testkit.footprint import changed, footprint
from hocket_testkit.observed import Observed
from hocket_testkit.observing import Observation, observe
from hocket_testkit.sync import no_sync
from hocket_testkit.ways import WaysToRun


class RunConformance(WaysToRun, Exceptions, Observed):
    """Test learning, randomness, state, data, other Trainers, and errors."""

    #: How long the reference model trains before its loss has to be lower.
    training: ClassVar[str] = "6ep"

    def test_trains(self) -> None:
        """The reference model learns: its loss on the training data falls."""
        trainer = self.trainer(self.make(), duration=self.training)
        data = self.seeded(self.data)
        before = _loss(trainer.evaluate(data))
        trainer.fit()
        after = _loss(trainer.evaluate(data))
        assert after < before, (
            f"The loss on the training data went from {before:.4g} to {after:.4g} in {self.training}. Give make() settings "
            "that train the model of model() on data(), or set `training` to a longer time."
        )

    def test_is_deterministic(self) -> None:
        """The same seed gives bitwise identical weights and metrics."""
        first, second = self.trainer(self.make()), self.trainer(self.make())
        torch.rand(3)  # the process's random numbers must not matter
        metrics = first.fit().metrics
        torch.rand(5)
        again = second.fit().metrics
        found = difference(weights(second), weights(first), at="weights") or difference(again, metrics, at="metrics")
        assert found is None, (
            f"Two runs with one seed differ: {found}. Draw random numbers from state.generator(self), and nowhere else."
        )

    def test_does_not_wait_for_the_device(self) -> None:
        """On the events of a step, from the second epoch on, nothing is copied from the device."""
        plugin, armed = self.make(), threading.Event()
        if not _watch(plugin, armed):
            return
        trainer = self.trainer(plugin)
        trainer.fit("1ep")  # one-time measurements may wait
        armed.set()
        trainer.fit("1ep")

    def test_leaves_the_data_alone(self) -> None:
        """The user's batches, samples and loader are unchanged after a run."""
        trainer = self.trainer(self.make())
        data = trainer.state.train_data
        before = copy.deepcopy(contents(data))
        trainer.fit()
        found = difference(contents(data), before, at="the training data")
        assert found is None, (
            f"The user's data has changed: {found}. Never write into state.batch: assign a new batch, such as "
            "state.batch = set_item(state.batch, 1, targets) from hocket.data.batches."
        )

    def test_two_trainers_do_not_notice_each_other(self) -> None:
        """Two Trainers that train in turns end with the same weights as each alone."""

        def pair() -> list[hocket.Trainer]:
            return [self.trainer(self.make(), seed=seed) for seed in (17, 18)]

        alone = pair()
        for trainer in alone:
            trainer.fit("1ep")
            trainer.fit("1ep")
        turns = pair()
        for trainer in (*turns, *turns):
            trainer.fit("1ep")
        for one, other in zip(turns, alone, strict=True):
            found = difference(weights(one), weights(other), at="weights")
            assert found is None, (
                f"A Trainer trains differently when another one trains too: {found}. Keep everything in self or in the state; "
                "nothing in the class, the module or torch's global settings."
            )

    def test_changes_nothing_unless_attached(self) -> None:
        """A run without it is the same before and after others have used it."""
        before, used, after = self.trainer(), self.trainer(self.make()), self.trainer()
        before.fit()
        process = footprint()
        used.fit()
        used.close()
        self.make()
        different = changed(process, footprint())
        assert not different, (
            f"A run with the plug-in changed {', '.join(different)}. Undo that when the run is closed."
        )
        after.fit()
        found = difference(weights(after), weights(before), at="weights")
        assert found is None, f"A run without the plug-in differs after a run with it: {found}."

    def test_trains_the_same_when_pickled(self) -> None:
        """An unpickled copy trains like the original."""
        here, there = self.trainer(self.make()), self.trainer(pickle.loads(pickle.dumps(self.make())))
        here.fit()
        there.fit()
        found = difference(weights(there), weights(here), at="weights")
        assert found is None, f"Training with a pickled copy of the plug-in differs: {found}."

    def test_keeps_its_state(self) -> None:
        """``state_dict`` goes through a file and into a fresh plug-in, which then holds the same."""
        used, fresh = self.make(), self.make()
        if not hasattr(used, "state_dict"):
            pytest.skip("it has no state_dict")
        self.trainer(used).fit()
        state = used.state_dict()
        wrong = _not_plain(state, "state_dict()")
        assert wrong is None, f"{wrong}. A state holds tensors, numbers, strings, None, and lists and dicts of them."
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        self.trainer(fresh)  # sets up a run, which happens before its state is loaded
        fresh.load_state_dict(torch.load(file, weights_only=True))
        found = difference(fresh.state_dict(), state, at="state_dict()")
        assert found is None, f"A fresh plug-in that loaded a state returns a different one: {found}."

    def test_resumes_in_the_middle(self) -> None:
        """A run resumed from a state within an epoch ends bitwise identical to the uninterrupted run."""
        whole, log, taken = self._whole_run("whole", take=True)
        assert taken, "The run ended before its second epoch. Give data() and make() that let it train two."
        for middle, state in taken.items():
            again = MemoryLogger()
            resumed = self._logged(f"after-{middle}", again)
            resumed.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
            resumed.fit()
            found = (
                difference(weights(resumed), weights(whole), at="weights")
                or difference(resumed.state.timestamp.batch, whole.state.timestamp.batch, at="the number of batches")
                or self._difference_of_logs(_after(middle, again), _after(middle, log), middle)
            )
            assert found is None, (
                f"A run that was resumed after batch {middle} differs from the same run without interruption: {found}. Return "
                "everything that later batches depend on from state_dict()."
            )

    def _observe(self) -> Observation:
        def start(plugin: Any, **changes: Any) -> hocket.Trainer:
            callbacks = [*self.arguments().get("callbacks", ()), changes.pop("callbacks")]
            return self.trainer(plugin, **changes, callbacks=callbacks)

        return observe(self.make, start, lambda: self.seeded(self.model), self.declared())

    def test_returns_what_it_wraps(self) -> None:
        """A wrapper of an action returns a value where the action did."""
        self._no_fault("returned")

    def test_trains_a_task_of_two_steps(self) -> None:
        """A `hocket.Task` that steps two optimizers in each batch trains and resumes bitwise, or is refused by the plan."""
        options: dict[str, Any] = {"loss": None, "optimizer": None}
        taken = _Takes()
        callbacks = [*self.arguments().get("callbacks", ()), taken]
        try:
            whole = self.trainer(self.make(), model=self.two_steps(), **options, callbacks=callbacks)
            taken.trainer = whole
            before = weights(whole)
            whole.fit()
        except PlanError:
            return  # refused by name, such as algorithms that act between a model's outputs and the loss
        after = weights(whole)
        for part in ("first", "second"):
            moved = [
                name
                for name in after
                if name.startswith(part) and difference(after[name], before.get(name)) is not None
            ]
            assert moved, (
                f"The step of the {part} model changed none of its weights. Use the parameters of the current step."
            )
        for middle, state in taken.states.items():
            resumed = self.trainer(self.make(), model=self.two_steps(), **options)
            resumed.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
            resumed.fit()
            found = difference(weights(resumed), after, at="weights")
            assert found is None, (
                f"A run of a task of two steps that was resumed after batch {middle} differs: {found}."
            )

    def _whole_run(self, name: str, take: bool) -> tuple[hocket.Trainer, MemoryLogger, dict[int, bytes]]:
        log, taken = MemoryLogger(), _Takes()
        trainer = self._logged(name, log, [*self.arguments().get("callbacks", ()), taken] if take else None)
        taken.trainer = trainer
        trainer.fit()
        return trainer, log, taken.states

    def _logged(self, name: str, log: MemoryLogger, callbacks: list[Any] | None = None) -> hocket.Trainer:
        changes: dict[str, Any] = {} if callbacks is None else {"callbacks": callbacks}
        loggers = [*self.arguments().get("loggers", ()), log]
        return self.trainer(self.make(), loggers=loggers, log_every="1ba", run_name=name, **changes)

    def _difference_of_logs(self, got: _Logged, expected: _Logged, middle: int) -> str | None:
        """Compare the values that are reproducible, unlike those of clocks."""
        found = difference(got, expected, at="what was logged after it")
        at, wanted = ({name: [batch for batch, _ in rows] for name, rows in log.items()} for log in (got, expected))
        if found is None or (wrong := difference(at, wanted, at="the batches at which values were logged")):
            return found and wrong
        repeated = _after(middle, self._whole_run("once-more", take=False)[1])
        same = [name for name, rows in expected.items() if difference(repeated.get(name), rows) is None]
        return difference(
            {name: got[name] for name in same}, {name: expected[name] for name in same}, at="what was logged after it"
        )

    def test_refuses_a_state_that_is_not_its_own(self) -> None:
        """An unknown key is an error that names it; it is not dropped."""
        plugin = self.make()
        if not hasattr(plugin, "load_state_dict"):
            pytest.skip("it has no load_state_dict")
        self.trainer(plugin).fit("1ba")
        with pytest.raises((ValueError, KeyError)) as refused:
            self.make().load_state_dict({**plugin.state_dict(), "no_such_key": 0})
        assert "no_such_key" in str(refused.value), (
            f"load_state_dict refused an unknown key with {str(refused.value)!r}. Name the key, so that the user finds it."
        )

    def test_an_evaluation_leaves_the_weights_alone(self) -> None:
        """Training continues with unchanged weights, whether an evaluation succeeds or fails."""
        planned = raiser("eval_after_forward", after=0)
        trainer = self.trainer(self.make(), callbacks=[planned])
        data = self.seeded(self.data)
        trainer.fit("1ep")
        planned.after = planned.calls + 2
        before = weights(trainer)
        with pytest.raises(Planned):
            trainer.evaluate(data)
        found = difference(weights(trainer), before, at="weights")
        assert found is None, f"An evaluation that failed changed the weights: {found}. Put them back on `exception`."
        trainer.evaluate(data)
        found = difference(weights(trainer), before, at="weights")
        assert found is None, f"An evaluation changed the weights: {found}. Put them back on `eval_after_all`."


#: Batches and values by name.
_Logged = dict[str, list[tuple[int, float]]]


class _Takes(hocket.Callback):
    """Keep the Trainer's state after the first two batches of the second epoch, serialised.

    Two, because behaviour that repeats every five batches would be the same again after the fifth.
    """

    trainer: hocket.Trainer

    def __init__(self) -> None:
        self.states: dict[int, bytes] = {}

    def batch_checkpoint(self, state: hocket.State) -> None:
        if state.timestamp.epoch == 1 and len(self.states) < 2:
            file = io.BytesIO()
            torch.save(self.trainer.state_dict(), file)
            self.states[state.timestamp.batch] = file.getvalue()


def _after(batch: int, log: MemoryLogger) -> _Logged:
    rows = {name: [(at, value) for at, value in rows if at > batch] for name, rows in log.metrics.items()}
    return {name: rows[name] for name in sorted(rows) if rows[name]}


#: Events of every step on which the state's tensors are on the device.
_STEP_EVENTS = between(Event.BEFORE_FORWARD, Event.BATCH_END)


def _watch(plugin: Any, armed: threading.Event) -> bool:
    """Run the plug-in's hooks of those events under `no_sync` while ``armed``. Return False if it has none."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with no_sync() if armed.is_set() else nullcontext():
                return function(*args, **kwargs)

        return call

    if isinstance(plugin, hocket.Algorithm):
        free, bound = plugin.apply, watched(plugin.apply)
        plugin.apply = lambda event, state: (bound if event in _STEP_EVENTS else free)(event, state)  # type: ignore[method-assign]
        return not set(_STEP_EVENTS).isdisjoint(plugin.events)
    hooks = [event.value for event in _STEP_EVENTS if hasattr(plugin, event.value)]
    for hook in hooks:
        setattr(plugin, hook, watched(getattr(plugin, hook)))
    return bool(hooks)


def _loss(values: dict[str, float]) -> float:
    assert "eval/loss" in values, (
        f"Evaluation gave {sorted(values)} and no loss. Give loss() or a model whose outputs hold a loss."
    )
    return values["eval/loss"]


def _not_plain(value: Any, at: str) -> str | None:
    """Describe the first part of a state that is not of a plain type."""
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return None
    if isinstance(value, dict):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is not None:
            return f"{at} has the key {strange!r}, which is {type(strange).__name__} and not str"
        return next((found for key, item in value.items() if (found := _not_plain(item, f"{at}[{key!r}]"))), None)
    if isinstance(value, list | tuple):
        return next((found for i, item in enumerate(value) if (found := _not_plain(item, f"{at}[{i}]"))), None)
    return f"{at} is {type(value).__name__}"
