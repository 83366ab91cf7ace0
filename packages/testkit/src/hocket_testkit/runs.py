"""Tests for every plug-in that takes part in a run."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

import hocket
from hocket.basics.plugin_errors import PlanError
from hocket.errors import Mistake, NotFinite
from hocket.hookspecs import Event
from hocket.hookspecs.events import between
from hocket.loggers.memory import MemoryLogger
from hocket.strategies import Strategy
from hocket.surgery import NoEffectWarning
from hocket_testkit.compare import difference
from hocket_testkit.conformance import Conformance, Planned, contents, raiser, weights
from hocket_testkit.footprint import changed, footprint
from hocket_testkit.handlers import silent_handlers
from hocket_testkit.observing import Observation, observe
from hocket_testkit.ranks import RankError, run_ranks
from hocket_testkit.sync import no_sync

#: By suite: what was seen of its plug-in.
_OBSERVED: dict[type, Observation] = {}


class Observed:
    """Tests of what is seen from outside in one run, which they share."""

    def observation(self) -> Observation:
        """Return what is seen of a plug-in from outside in one run, which several tests share."""
        if type(self) not in _OBSERVED:
            _OBSERVED[type(self)] = self._observe()
        return _OBSERVED[type(self)]

    def _observe(self) -> Observation:
        raise NotImplementedError

    def _no_fault(self, name: str) -> None:
        fault = self.observation().faults.get(name)
        assert fault is None, fault

    def test_keeps_no_tensors(self) -> None:
        """After a run was closed, the plug-in keeps no tensors alive but those of its state."""
        self._no_fault("tensors")

    def test_closes_files_threads_and_processes(self) -> None:
        """After a run was closed, files, threads and processes of the plug-in are closed, too."""
        self._no_fault("resources")

    def test_removes_its_hooks(self) -> None:
        """After a run was closed, the user's model has the hooks that it had before."""
        self._no_fault("hooks")

    def test_does_not_grow(self) -> None:
        """Memory, hooks, threads and files do not grow with every batch."""
        self._no_fault("growth")

    def test_leaves_global_generators_alone(self) -> None:
        """The global random numbers of a run depend on its seed, and are not the same again and again."""
        self._no_fault("numbers")

    def test_keeps_no_state_in_the_class(self) -> None:
        """A run changes no attribute of the class or its module, which other runs share."""
        self._no_fault("class")

    def test_counts_what_the_data_hold(self) -> None:
        """Epochs, batches and samples are those of the data, with and without it; tokens are those that the model gets."""
        self._no_fault("counts")


class RunConformance(Observed, Conformance):
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

    # --- other ways to run

    def test_works_with_microbatches(self) -> None:
        """Training with microbatches equals training on full batches, up to rounding."""
        full, split = self.trainer(self.make()), self.trainer(self.make(), microbatch=3)
        full.fit()
        split.fit()
        found = difference(weights(split), weights(full), self.tolerance("test_works_with_microbatches", 1e-4))
        assert found is None, (
            f"With microbatch=3 the weights differ: {found}. Act on the full batch (Event.AFTER_DATALOADER, "
            "Event.AFTER_TRAIN_BATCH) or identically on every sample. If it is meant to differ, say why in `exempt`; if it is "
            "rounding, allow for it in `tolerances`."
        )

    def test_works_in_bf16(self) -> None:
        """A run with ``precision="bf16"`` trains near one in fp32, with weights of the same dtypes, or is refused by name."""
        try:
            trainer = self.trainer(self.make(), precision="bf16")
        except Mistake as refused:
            assert "bf16" in str(refused), f"precision='bf16' is refused without being named: {refused}"
            return
        exact = self.trainer(self.make())
        before = weights(exact)
        try:
            trainer.fit("1ep")
        except Exception as error:
            raise AssertionError(
                f"With precision='bf16' it raises {type(error).__name__}: {str(error).partition(chr(10))[0]} Activations, and "
                "outputs, are bfloat16 then: convert what needs float32, or refuse the precision by name in before_fit."
            ) from error
        exact.fit("1ep")
        got, wanted = weights(trainer), weights(exact)
        dtypes = [
            name for name in wanted if getattr(got.get(name), "dtype", None) != getattr(wanted[name], "dtype", None)
        ]
        assert not dtypes, f"With precision='bf16' the dtypes of {', '.join(dtypes)} change. Weights stay as they are."
        off, moved = _distance(got, wanted), _distance(wanted, before)
        bound = self.tolerance("test_works_in_bf16", 0.5)
        assert off <= bound * moved or not moved, (
            f"With precision='bf16' the weights end {off:.2g} from those in fp32, which moved by {moved:.2g}. Sums, norms and "
            "small differences need float32: convert to it, and back."
        )

    def test_works_in_every_combination(self) -> None:
        """It trains in bf16 with microbatches and with ``accumulate``, also on two ranks with ddp and fsdp, or is refused."""

        def train(make: Callable[[], Any], **changes: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # it may do nothing in a combination, and say so
                try:
                    trainer = self.trainer(make(), **changes)
                    trainer.fit("1ep")
                except NotFinite as error:
                    raise AssertionError(f"With {changes} training diverges: {error}") from None
                except Mistake:
                    return None  # refused by name: it does not claim this combination
            trainer.close()
            return weights(trainer)

        windows: dict[str, Any] = {"accumulate": "2ba"}
        for changes in ({"precision": "bf16", "microbatch": 3}, windows, windows | {"microbatch": 3}):
            got = train(self.make, **changes)
            bad = [name for name, value in (got or {}).items() if torch.is_tensor(value) and not value.isfinite().all()]
            assert not bad, f"With {changes} the weights {', '.join(bad)} are not finite."
        for strategy in ("ddp", "fsdp"):
            several = {"strategy": strategy, "precision": "bf16", "microbatch": 2}

            def on_ranks(name: str, make: Callable[[], Any], several: dict[str, Any] = several) -> list[Any]:
                return _on_two_ranks(lambda rank: train(make, **several, run_name=name))

            try:
                first, second = on_ranks(strategy, self.make)
            except RankError as error:
                try:
                    on_ranks(f"{strategy}-without", lambda: None)
                except RankError:
                    continue  # the model cannot train so without it either
                raise AssertionError(
                    f"With {several} two ranks do not train: {str(error).strip().splitlines()[-1]}"
                ) from None
            found = difference(second, first, at="weights")
            assert found is None, f"With {several} two ranks end with different weights: {found}."

    def test_does_not_depend_on_the_rank(self) -> None:
        """The second of two ranks with the same data and random numbers trains as the first, with the same state."""
        plugins = [self.make(), self.make(), self.make()]
        trained = []
        for rank, plugin in zip((0, 1, 0), plugins, strict=True):
            trainer = self.trainer(plugin, strategy=_OneOfTwo(rank))
            trainer.fit()
            trained.append(weights(trainer))
            trainer.close()
        found = difference(trained[1], trained[0], at="weights")
        if found is None and hasattr(plugins[0], "state_dict"):
            first, second, again = (plugin.state_dict() for plugin in plugins)
            if difference(again, first) is None:  # without times of a clock
                found = difference(second, first, at="state_dict()")
        assert found is None, (
            f"On rank 1 it acts otherwise than on rank 0, with the same data and random numbers: {found}. Let all ranks do the "
            "same, and only write files on rank 0; draw with state.generator(self, per_rank=True) where ranks should differ."
        )

    def test_works_on_two_ranks(self) -> None:
        """With ``strategy="ddp"`` both ranks end with the same weights, or the plan refuses it by name."""

        def rank_main(rank: int) -> Any:
            plugin = self.make()
            try:
                trainer = self.trainer(plugin, strategy="ddp")
            except PlanError:
                return None
            timestamp = trainer.fit().timestamp
            trainer.close()
            return weights(trainer), timestamp.batch

        try:
            first, second = _on_two_ranks(rank_main)
        except RankError as error:
            lines = str(error).strip().splitlines()
            raise AssertionError(
                f"Two ranks do not train with it: {lines[0]} {lines[-1]}. All ranks have to call the same collectives, and to "
                "work with a slice of the batch."
            ) from None
        found = difference(second, first, at="(weights, batches)")
        assert found is None, (
            f"After a run on two ranks they differ: {found}. Change gradients and weights on all ranks in the same way: what "
            "depends on a rank's own batch has to be reduced, with state.bus.all_reduce(tensor, 'mean')."
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

    @pytest.mark.parametrize("place", ["forward", "loss", "optimizer"])
    def test_does_not_swallow_exceptions(self, place: str) -> None:
        """An exception in the user's model, loss or optimizer leaves ``fit`` as it is."""
        model, calls = self.seeded(self.model), []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise Planned(f"raised by a test in the {place}")

        trainer = self.trainer(self.make(), model=model)
        if place == "forward":
            trainer.state.task.register_forward_pre_hook(fail)
        elif place == "optimizer":
            trainer.state.optimizers[0].register_step_pre_hook(fail)
        else:
            inner = trainer.state.task.loss

            def failing(*given: Any) -> Any:
                fail()
                return inner(*given)

            vars(trainer.state.task)["loss"] = failing
        with contextlib.suppress(Planned):
            trainer.fit()
            assert len(calls) < 2, (
                f"An exception in the user's {place} did not leave fit(): something caught it. Catch only errors that the "
                "plug-in handles, by their classes, and let all others propagate."
            )
        trainer.close()

    def test_catches_only_what_it_handles(self) -> None:
        """No `except Exception` of its module drops the exception without a word."""
        lines = silent_handlers(self.declared())
        assert not lines, (
            f"{self._module()} swallows every exception in line {', '.join(map(str, lines))}. Catch the classes that are "
            "expected there, or raise again; at least warn with what failed."
        )

    @pytest.mark.parametrize("hook", ["before_forward", "before_loss", "after_train_batch", "batch_end", "eval_start"])
    def test_an_exception_leaves_nothing_behind(self, hook: str) -> None:
        """After any exception in a hook, it propagates unchanged, process and data are unchanged, and training can continue."""
        trainer = self.trainer(self.make(), callbacks=[raiser(hook, after=1 if hook == "eval_start" else 2)])
        data = trainer.state.train_data
        batches = copy.deepcopy(contents(data))
        before = footprint()
        with pytest.raises(Planned) as caught:
            trainer.fit()
        notes = [note for note in getattr(caught.value, "__notes__", ()) if note.startswith("Meanwhile")]
        assert not notes, f"When something else raised, the plug-in raised too: {notes}."
        different = changed(before, footprint())
        assert not different, (
            f"After an exception in {hook}, {', '.join(different)} is not as before. Undo it on `exception` or `close`."
        )
        found = difference(contents(data), batches, at="the training data")
        assert found is None, f"After an exception in {hook} the user's data has changed: {found}."
        trainer.close()
        trainer.close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The last fit raised")
            try:
                trainer.fit("1ba")
            except RuntimeError as refused:  # where an optimizer step was interrupted
                assert str(refused).startswith("The last fit raised")
        trainer.close()


class _OneOfTwo(Strategy):
    """One of two ranks that compute the same in lockstep, without the other one."""

    world_size = 2
    data_rank = 0
    data_ranks = 1

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor * 2 if op == "sum" else tensor.clone()

    def all_gather_object(self, item: object) -> list[Any]:
        return [item, item]


def _on_two_ranks(function: Callable[[int], Any]) -> list[Any]:
    """Return the result of each rank; the data of `data`, a list, are read by both, which is as wanted."""

    def rank_main(rank: int) -> Any:
        warnings.filterwarnings("ignore", "Every rank reads all of the list")
        return function(rank)

    return run_ranks(rank_main, 2)


def _distance(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the distance between two sets of weights."""
    pairs = [(got[name], expected[name]) for name in expected if isinstance(expected[name], torch.Tensor)]
    return sum(float((a.double() - b.double()).square().sum()) for a, b in pairs if a.shape == b.shape) ** 0.5


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
