"""Observe one run of a plug-in from outside, and say what it left behind, kept, lost or changed without telling."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import multiprocessing
import os
import random
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import hocket
from hocket.hookspecs import Actions
from hocket.state.step import count

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
    seen, watch, short = Observation(), _Watch(), _Watch()
    with start(
        make(), model=model(), duration="1ep", seed=18, callbacks=short
    ) as other:  # what is made once, is made now
        other.fit()
        progress = other.state.timestamp
    del other
    with _only_new_objects():
        resources, classes = _resources(), shared_state(owned)
        plugin = make()
        given = set(map(id, _tensors()))  # such as those of a teacher
        trained = model()
        hooks, modules = _hooks_of(trained), dict(trained.named_modules())
        watch.plugin, wrappers = plugin, _watch_wrappers(plugin)
        trainer = start(plugin, model=trained, duration=f"{_EPOCHS}ep", seed=17, callbacks=watch)
        if trainer.state.replacements or isinstance(
            plugin, hocket.Precision
        ):  # hooks are a part of the converted model
            hooks = _hooks_of(trained)
        trainer.fit()
        if watch.growth():
            watch.sizes, watch.pause = [], _BUFFERED
            trainer.fit(f"{_MORE}ep")
        _compare_growth(seen, watch)
        _compare_surgery(seen, trainer, plugin, modules, trained)
        _compare_wrappers(seen, wrappers)
        trainer.close()
        _compare_hooks(seen, hooks, trained)
        usual = {each.shape for module in (trained, *modules.values()) for each in module.state_dict().values()}
        watch.plugin, run = None, weakref.ref(trainer.state)
        del trainer, trained, modules
        gc.collect()
        given |= _of_run(run(), plugin)
        _compare_resources(seen, resources)
        _compare_classes(seen, classes, owned)
        _compare_tensors(seen, plugin, usual, given, watch.shapes)
        algorithm = isinstance(plugin, hocket.Algorithm)
        del plugin
        gc.collect()
        _compare_tensors(seen, None, set(), set(), set())
    without = _Watch()
    with start(None, model=model(), duration="1ep", seed=18, callbacks=without) as reference:
        reference.fit()
        _compare_counts(seen, progress, reference.state.timestamp, watch.miscounted)
    _compare_numbers(seen, watch.numbers, short.numbers, without.numbers, algorithm)
    return seen


@contextlib.contextmanager
def _only_new_objects() -> Iterator[None]:
    """Leave the objects that exist out of garbage collections and of `_tensors`."""
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
        #: The latest batch of other tokens than were counted: its number, those counted, and those that the model got.
        self.miscounted: tuple[int, int, int] | None = None
        #: The shapes of batches and outputs.
        self.shapes: set[torch.Size] = set()

    def after_forward(self, state: hocket.State) -> None:
        counted = state.batch_tokens
        if counted and (got := count(state, state.batch)).tokens != counted and got.samples == state.step.samples:
            self.miscounted = state.timestamp.batch, counted, got.tokens  # in the full batch, not a microbatch

    def batch_end(self, state: hocket.State) -> None:
        self.shapes |= {each.shape for each in _leaves((state.batch, state.outputs)) if each.ndim > 1}
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
                    "tensors in memory": len(_tensors()),
                    "values in the plug-in": size(self.plugin),
                    "hooks on the model": sum(_hooks_of(state.task).values()),
                    "threads": threading.active_count(),
                    "open files": len(_files()),
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


# --- what is in memory, open or running


def _tensors() -> list[Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def _files() -> dict[str, str]:
    """Return the files, pipes and sockets that are open, by descriptor; empty where the system does not list them."""
    folder = "/proc/self/fd"
    found = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile, such as that of the listing
                found[number] = os.readlink(f"{folder}/{number}")
    return found


def _resources() -> tuple[dict[str, str], set[threading.Thread], set[int | None]]:
    return _files(), set(threading.enumerate()), {each.pid for each in multiprocessing.active_children()}


def _compare_resources(
    seen: Observation, before: tuple[dict[str, str], set[threading.Thread], set[int | None]]
) -> None:
    files, threads, processes = _resources()
    left = [
        *(
            f"the file {path}"
            for number, path in files.items()
            if before[0].get(number) != path and os.path.isabs(path)
        ),
        *(f"the thread {each.name}" for each in threads - before[1]),
        *(f"the process {each}" for each in processes - before[2]),
    ]
    # Some sockets and pipes are torch's own, opened once for the process.
    if left:
        seen.faults["resources"] = (
            f"After the run was closed there is still {', '.join(left)}. Close files, join threads and end processes in "
            "close(state), and also on `exception`."
        )


def _compare_tensors(
    seen: Observation, plugin: Any, usual: set[torch.Size], given: set[int], shapes: set[torch.Size]
) -> None:
    """Compare the tensors in memory with those that a plug-in may keep for a later fit, which are not of a batch."""
    state = plugin.state_dict() if hasattr(plugin, "state_dict") else {}
    saved = given | {id(each) for each in _leaves(state)}
    kept = [
        each
        for each in _tensors()
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


def _of_run(state: Any, plugin: Any) -> set[int]:
    """Return the ids of the tensors that a run holds by itself, if the plug-in keeps its state: both end together."""
    waiting, visited, found = [state], {id(plugin), id(vars(plugin)) if hasattr(plugin, "__dict__") else 0}, set()
    while waiting:
        each = waiting.pop()
        if id(each) in visited or isinstance(each, type | ModuleType):
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            found |= {id(each), id(each._base)}
        waiting += (each.__closure__ or ()) if inspect.isfunction(each) else gc.get_referents(each)
    return found


def _leaves(nested: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(nested) if isinstance(each, Tensor)]


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


def size(obj: Any, visited: set[int] | None = None) -> int:
    """Return the number of values that an object holds: items of containers and elements of tensors, without core's own.

    A deque with ``maxlen`` counts as if it were full of its largest item. Objects whose ids are in ``visited`` count nothing.
    """
    total, waiting = 0, [obj]
    visited = set() if visited is None else visited
    while waiting:
        each = waiting.pop()
        if id(each) in visited or len(visited) > 200_000:
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            total += each.numel()
        elif isinstance(each, deque) and each.maxlen is not None:
            total += each.maxlen * (1 + max((size(item, visited) for item in each), default=0))
        elif isinstance(each, dict | list | tuple | set | frozenset | deque):
            total += len(each)
            waiting += [*each.values()] if isinstance(each, dict) else [*each]
        elif inspect.isfunction(each):
            waiting += [cell.cell_contents for cell in each.__closure__ or () if not _is_empty(cell)]
        elif inspect.ismethod(each):
            waiting += [each.__func__, each.__self__]
        elif hasattr(each, "__dict__") and not isinstance(each, type | nn.Module) and not _foreign(type(each)):
            waiting.append(vars(each))
    return total


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _foreign(cls: type) -> bool:
    top = cls.__module__.partition(".")[0]
    return top in ("hocket", "torch", "hocket_testkit") or top in sys.stdlib_module_names


# --- state that Trainers share


def shared_state(owned: Any) -> dict[str, Any]:
    """Return the attributes of a plug-in's class, its bases beside hocket's, and their modules, by name, as plain data."""
    found: dict[str, Any] = {}
    for name, cls in _classes(owned).items():
        found |= {f"{name}.{key}": _plain(value) for key, value in vars(cls).items() if _counts(key)}
    for module in {getattr(each, "__module__", "") for each in (owned, *_classes(owned).values())}:
        variables = list(vars(sys.modules[module]).items()) if module in sys.modules else []
        found |= {f"{module}.{key}": _plain(value) for key, value in variables if _counts(key)}
    return found


def _classes(owned: Any) -> dict[str, type]:
    classes = inspect.getmro(owned) if isinstance(owned, type) else ()
    return {each.__qualname__: each for each in classes if not _foreign(each)}


def _counts(name: str) -> bool:
    return not name.startswith("__") and not name.startswith("_abc_")


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value that is equal later only if nothing in ``value`` changed."""
    if isinstance(value, Tensor):
        return (id(value), value._version)
    if isinstance(value, bool | int | float | str | bytes | None.__class__):
        return value
    if depth < 4 and isinstance(value, Mapping | weakref.WeakKeyDictionary) and len(value) < 1000:
        with contextlib.suppress(Exception):
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < 4 and isinstance(value, list | tuple | set | frozenset) and len(value) < 1000:
        return [
            _plain(item, depth + 1) for item in (value if isinstance(value, list | tuple) else sorted(value, key=repr))
        ]
    if type(value).__module__ == "itertools" and type(value).__name__ == "count":
        return repr(value)
    return id(value)


# --- wrappers and surgery


def _watch_wrappers(plugin: Any) -> dict[str, list[bool]]:
    """Replace the wrappers of actions of a plug-in; return for each whether it lost a result, and swallowed an error."""
    found: dict[str, list[bool]] = {}
    for name in (each for each in vars(Actions) if not each.startswith("_")):
        function = getattr(plugin, name, None)
        options = getattr(function, "hocket_impl", None) or {}
        if function is not None and options.get("wrapper"):
            found[f"{type(plugin).__name__}.{name}"] = record = [False, False]
            setattr(plugin, name, _watched(function, record))
    return found


def _compare_wrappers(seen: Observation, wrappers: dict[str, list[bool]]) -> None:
    for name, (lost, swallowed) in wrappers.items():
        if lost:
            seen.faults["returned"] = (
                f"The wrapper {name} returns None, and what it wraps returned a value, which is lost. Write `result = yield` "
                "and `return result`."
            )
        if swallowed:
            seen.faults["swallowed"] = (
                f"The wrapper {name} ends normally though what it wraps raised. Let it propagate."
            )


def _watched(function: Callable[..., Any], record: list[bool]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        generator = function(*args, **kwargs)
        next(generator)
        try:
            result = yield
        except BaseException as error:
            try:
                generator.throw(error)
            except StopIteration as stop:
                record[1] = True
                return stop.value
            return None
        try:
            generator.send(result)
        except StopIteration as stop:
            record[0] |= result is not None and stop.value is None
            return stop.value

    return call


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


def _compare_classes(seen: Observation, before: dict[str, Any], owned: Any) -> None:
    after = shared_state(owned)
    found = [name for name in after if name not in before and name.rpartition(".")[0] in _classes(owned)]
    found += [name for name, value in before.items() if name in after and after[name] != value]
    if found:
        seen.faults["class"] = (
            f"The run changed {', '.join(found)}, which all Trainers of the process share. Keep it in self, set in __init__ "
            "or on an event."
        )
