"""Observe one run of a plug-in from outside, and say what it left behind, kept, lost or changed without telling."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hocket
from hocket.state.step import count
from hocket_testkit.memory import Resources, children, leaves, open_files, size, tensors, tensors_of_run
from hocket_testkit.process import Draws, Process
from hocket_testkit.shared_state import shared_state, state_changes
from hocket_testkit.wrappers import watch_wrappers

#: Epochs of the run, of which growth is measured over the last.
_EPOCHS = 6
_MEASURED = 4
#: More epochs for what grew, because a window of the latest values grows until it is full.
_MORE = 8
#: Seconds between those, in which a thread of the plug-in may write what it buffers.
_BUFFERED = 0.5
#: What may grow with epochs, such as results of evaluations, but not with batches.
_PER_BATCH = ("tensors in memory", "values in the plug-in")
#: Where hooks of a module, and of a parameter, are.
_MODULE_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Observation:
    """The faults of a run by name, each with what to do."""

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}


def observe(
    make: Callable[[], Any], start: Callable[..., hocket.Trainer], model: Callable[[], nn.Module], owned: Any
) -> Observation:
    """Run a plug-in for six epochs, close the run, and return what was seen; then compare it with short runs.

    Args:
        make: makes a plug-in.
        start: makes a Trainer with the plug-in, or without for None; its keyword arguments change those of the Trainer.
        model: makes the user's model.
        owned: the plug-in's class or function, whose class attributes and module are compared.
    """
    seen, watch, short, without = Observation(), _Watch(), _Watch(), _Watch()
    with start(None, model=model(), duration="1ep", seed=18, callbacks=without) as reference:
        reference.fit()
        expected = reference.state.timestamp
    del reference
    process, started = Process(owned), children()
    with process.watched():
        plugin, trained = make(), model()
        draws = Draws(plugin, trained)
        with start(plugin, model=trained, duration="1ep", seed=18, callbacks=short) as other:
            other.fit()  # what is made once, is made now
            _compare_counts(seen, other.state.timestamp, expected, short.miscounted)
        del other, plugin, trained
        algorithm = _observe_long_run(seen, make, start, model, owned, watch, process, started)
    _compare_numbers(seen, watch.numbers, short.numbers, without.numbers, algorithm)
    if draws.found and "numbers" not in seen.faults:
        names = " and ".join(f"{generator} in {hook}" for generator, hook in draws.found.items())
        seen.faults["numbers"] = (
            f"It draws from the global generator of {names}: each rank draws other numbers, and so does a model with one more "
            "dropout. Draw from state.generator(self), or with per_rank=True where ranks should differ."
        )
    _compare_process(seen, process, watch)
    return seen


def _observe_long_run(
    seen: Observation,
    make: Callable[[], Any],
    start: Callable[..., hocket.Trainer],
    model: Callable[[], nn.Module],
    owned: Any,
    watch: _Watch,
    process: Process,
    started: dict[int, str],
) -> bool:
    """Run a plug-in for six epochs and close the run; return whether it is an algorithm."""
    with _only_new_objects():
        resources, classes = Resources(started), shared_state(owned)
        plugin = make()
        given = set(map(id, tensors()))  # such as those of a teacher
        trained = model()
        hooks, modules = _hooks_of(trained), dict(trained.named_modules())
        watch.plugin, watch.process, losing = plugin, process, watch_wrappers(plugin)
        trainer = start(plugin, model=trained, duration=f"{_EPOCHS}ep", seed=17, callbacks=watch)
        # Hooks are a part of what surgery, or a precision, made of the model.
        if trainer.state.replacements or isinstance(plugin, hocket.Precision):
            hooks = _hooks_of(trained)
        trainer.fit()
        if watch.growth():
            watch.sizes, watch.pause = [], _BUFFERED
            trainer.fit(f"{_MORE}ep")
        _compare_growth(seen, watch)
        _compare_surgery(seen, trainer, plugin, modules, trained)
        if losing:
            seen.faults["returned"] = (
                f"The wrapper {', '.join(sorted(losing))} returns None, and what it wraps returned a value, which is lost. "
                "Write `result = yield` and `return result`."
            )
        trainer.close()
        _compare_hooks(seen, hooks, trained)
        usual = {each.shape for module in (trained, *modules.values()) for each in module.state_dict().values()}
        watch.plugin, run = None, weakref.ref(trainer.state)
        del trainer, trained, modules
        gc.collect()
        given |= tensors_of_run(run(), plugin)
        if left := resources.left():
            seen.faults["resources"] = (
                f"After the run was closed there is still {', '.join(left)}. Close files, join threads and end processes in "
                "close(state), and also on `exception`."
            )
        if changes := state_changes(classes, owned):
            seen.faults["class"] = (
                f"The run changed {', '.join(changes)}, which all Trainers of the process share. Keep it in self, set in "
                "__init__ or on an event."
            )
        _compare_tensors(seen, plugin, usual, given, watch.shapes)
        algorithm = isinstance(plugin, hocket.Algorithm)
        del plugin
        gc.collect()
        _compare_tensors(seen, None, set(), set(), set())
    return algorithm


@contextlib.contextmanager
def _only_new_objects() -> Iterator[None]:
    """Leave the objects that exist out of garbage collections and of `tensors`."""
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


class _Watch(hocket.Callback):
    """Draw random numbers in each batch, as dropout does, and measure at the end of each epoch."""

    def __init__(self) -> None:
        self.plugin: Any = None
        self.sizes: list[Counter[str]] = []
        self.numbers: list[dict[str, int]] = []
        self.epochs = 0
        #: Seconds to wait before measuring.
        self.pause = 0.0
        #: The latest batch whose tokens were miscounted: its number, the tokens counted, and the tokens that the model got.
        self.miscounted: tuple[int, int, int] | None = None
        #: Of the plug-in's code: by "sleep" and "print", the number of batches in which it was called.
        self.process: Process | None = None
        self.calls: Counter[str] = Counter()
        self._called = {"sleep": 0, "print": 0}
        #: The shapes of batches and outputs.
        self.shapes: set[torch.Size] = set()

    def after_forward(self, state: hocket.State) -> None:
        counted = state.batch_tokens
        if counted and (got := count(state, state.batch)).tokens != counted and got.samples == state.step.samples:
            self.miscounted = state.timestamp.batch, counted, got.tokens  # in the full batch, not a microbatch

    def batch_end(self, state: hocket.State) -> None:
        if self.process is not None:
            called = {name: number for name, (number, _) in self.process.calls.items()}
            self.calls.update(name for name, number in called.items() if number > self._called[name])
            self._called = called
        self.shapes |= {each.shape for each in leaves((state.batch, state.outputs)) if each.ndim > 1}
        torch.rand(1)
        random.random()
        numbers = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
        if numpy := sys.modules.get("numpy"):
            numpy.random.rand()
            _, keys, position, *_ = numpy.random.get_state()
            numbers["numpy.random"] = keys.tobytes(), position
        self.numbers.append({name: hash(value) for name, value in numbers.items()})

    def epoch_end(self, state: hocket.State) -> None:
        self.epochs += 1
        if self.plugin is None:
            return
        time.sleep(self.pause)
        gc.collect()
        self.sizes.append(
            Counter(
                {
                    "tensors in memory": len(tensors()),
                    "values in the plug-in": size(self.plugin),
                    "hooks on the model": sum(_hooks_of(state.task).values()),
                    "threads": threading.active_count(),
                    "open files": len(open_files()),
                }
            )
        )

    def growth(self) -> str:
        """Return what grew in each of the last epochs, or empty."""
        last = self.sizes[-_MEASURED:]
        least = dict.fromkeys(_PER_BATCH, len(self.numbers) // max(1, self.epochs))
        pairs = list(itertools.pairwise(last))
        names = (
            [name for name in last[0] if all(b[name] - a[name] >= least.get(name, 1) for a, b in pairs)]
            if len(last) == _MEASURED
            else []
        )
        return " and ".join(f"{last[-1][name] - last[-2][name]} {name}" for name in names)


def _compare_growth(seen: Observation, watch: _Watch) -> None:
    if growth := watch.growth():
        seen.faults["growth"] = (
            f"With every epoch there are {growth} more, without end. Keep running sums, or the latest values only "
            "(collections.deque with maxlen), and detach what is kept of a loss."
        )


# --- what is left


def _compare_tensors(
    seen: Observation, plugin: Any, usual: set[torch.Size], given: set[int], shapes: set[torch.Size]
) -> None:
    """Compare the tensors in memory with those that a plug-in may keep for a later fit, which are not of a batch."""
    state = plugin.state_dict() if hasattr(plugin, "state_dict") else {}
    saved = given | {id(each) for each in leaves(state)}
    kept = [
        each
        for each in tensors()
        if plugin is None or each.grad_fn is not None or (each.shape in shapes - usual and id(each) not in saved)
    ]
    if kept and "tensors" not in seen.faults:
        sizes = sorted({f"{tuple(each.shape)}{' with its graph' if each.grad_fn else ''}" for each in kept})
        where = (
            "The plug-in keeps" if plugin is not None else "Something other than the plug-in, such as its module, keeps"
        )
        seen.faults["tensors"] = (
            f"{where} {len(kept)} tensors after the run was closed and its Trainer is gone, of shapes {', '.join(sizes[:5])}. "
            "Drop batches, outputs, losses and caches in close(state), or return from state_dict() what a later fit needs."
        )


def _hooks_of(model: nn.Module) -> Counter[str]:
    """Return the number of hooks on each module and parameter, by name."""
    found: Counter[str] = Counter()
    for name, module in model.named_modules():
        found[name] += sum(len(getattr(module, each, None) or ()) for each in _MODULE_HOOKS)
    for name, parameter in model.named_parameters():
        found[name] += sum(len(getattr(parameter, each, None) or ()) for each in _PARAMETER_HOOKS)
    return +found


def _compare_hooks(seen: Observation, before: Counter[str], model: nn.Module) -> None:
    if left := _hooks_of(model) - before:
        seen.faults["hooks"] = (
            f"After the run was closed, hooks are left on the user's model: {', '.join(name or 'itself' for name in left)}. "
            "Keep the handles, and remove them in close(state)."
        )


def _compare_surgery(
    seen: Observation, trainer: hocket.Trainer, plugin: Any, before: dict[str, nn.Module], model: nn.Module
) -> None:
    """Compare the modules that differ with those that surgery recorded and previewed."""
    if not isinstance(plugin, hocket.Algorithm):
        return
    after = dict(model.named_modules())
    changed = [name for name, module in before.items() if after.get(name) is not module or "forward" in vars(module)]
    changed += [name for name in after if name not in before]
    recorded = {id(each) for record in trainer.state.replacements for each in (record.old, record.new)}
    names = {record.name for record in trainer.state.replacements}
    outer = [name for name in changed if not any(name.startswith(f"{other}.") for other in changed)]
    planned = "\n".join(line for lines in trainer.plan().surgery.values() for line in lines)
    patched = {name for name in changed if after.get(name) is before.get(name) and name.rpartition(".")[2] in planned}
    missing = [
        name or type(model).__name__
        for name in outer
        if not {id(before.get(name)), id(after.get(name))} & recorded and name not in names | patched
    ]
    if missing:
        seen.faults["surgery"] = (
            f"The modules {', '.join(missing)} were replaced, and state.replacements does not say so. Use "
            "hocket.surgery.replace_modules, and append what it returns to state.replacements: optimizers, checkpoints and the "
            "summary follow it."
        )
        return
    unseen = [record.name for record in trainer.state.replacements if record.name.rpartition(".")[2] not in planned]
    if unseen:
        seen.faults["surgery"] = (
            f"Surgery replaced {', '.join(unseen)}, and touches(model) did not preview it, so that the plan of the run omits "
            "it. Return a line for each module that would be replaced, with its name."
        )


# --- counts and random numbers


def _compare_counts(seen: Observation, got: Any, expected: Any, miscounted: tuple[int, int, int] | None) -> None:
    """Compare the counts of an epoch with those of the data, and tokens with those that the model got."""
    if miscounted is not None:
        seen.faults["counts"] = "Batch {} counts {} tokens, and the model gets {}.".format(*miscounted) + (
            " Tokens count as trained on: change their number on Event.AFTER_DATALOADER, and assign a new state.batch."
        )
    names = [name for name in ("epoch", "batch", "sample") if getattr(got, name) != getattr(expected, name)]
    if names:
        counts = ", ".join(f"{getattr(got, name)} instead of {getattr(expected, name)} {name}s" for name in names)
        seen.faults["counts"] = (
            f"An epoch counts {counts}. Progress counts what the data hold, also if a plug-in selects some of it: replace "
            "state.batch on Event.AFTER_DATALOADER, when the batch was counted already, and request no more steps."
        )


def _compare_numbers(seen: Observation, *runs: Any) -> None:
    """Compare the states of the generators in a run, in a run with another seed, and in that without the plug-in."""
    run, other, without, algorithm = runs
    for name in run[0]:
        states = [each[name] for each in run]
        if len(set(states)) < len(states) or any(a == b[name] for a, b in zip(states, other, strict=False)):
            seen.faults["numbers"] = (
                f"The random numbers of {name} repeat, in two batches or in runs with different seeds: something seeds the "
                "global generator. Draw from state.generator(self), and leave the global generators as they are."
            )
        elif not algorithm and any(a[name] != b[name] for a, b in zip(other, without, strict=False)):
            seen.faults["numbers"] = (
                f"The random numbers of {name} differ from those of a run without it, whose model would draw others. Draw "
                "from state.generator(self), or restore the state of the global generator."
            )


# --- the process


def _compare_process(seen: Observation, process: Process, watch: _Watch) -> None:
    if different := process.differences():
        seen.faults["process"] = (
            f"After the run was closed the process is not as before: {', '.join(different[:8])}. Change "
            "nothing that other runs share; where it has to be, put it back in close(state), and also on `exception`."
        )
    if files := process.new_files():
        seen.faults["files"] = (
            f"It wrote {', '.join(files[:8])} into the working directory. Write into state.run_folder, on rank 0."
        )
    often = {name for name, batches in watch.calls.items() if batches > 0.9 * len(watch.numbers)}
    if "print" in often:
        seen.faults["print"] = (
            f"It writes to standard output in every batch, in {process.calls['print'][1]}. Give values to state.log({{…}}), "
            "which loggers show, and rare notes to warnings.warn or logging.getLogger(__name__)."
        )
    if "sleep" in often:
        seen.faults["sleep"] = (
            f"It calls time.sleep in every batch, in {process.calls['sleep'][1]}, while the device waits. Do the work where it "
            "is needed without a pause, or what has to wait in a thread that ends in close(state)."
        )
