"""``microbatch="auto"``: find the largest microbatch that fits in memory, and halve it if memory still runs out."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hocket.basics import safe_files, seeding
from hocket.basics.types import Batch
from hocket.data.batches import Window
from hocket.data.nesting import map_tensors
from hocket.data.stateful import has_state
from hocket.devices.memory import is_out_of_memory
from hocket.help import warn
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.callback import Callback
from hocket.hookspecs.events import MICROBATCH_EVENTS
from hocket.loop.actions import compute_gradients, compute_microbatch
from hocket.loop.carry import split_carry
from hocket.loop.trial import without_trace
from hocket.run import same_on_ranks
from hocket.state.metrics import MetricSet
from hocket.state.state import State
from hocket.state.step import UserStep, count


class AutoMicrobatch(Callback):
    """Implement the action `gradients` with microbatches that fit in memory.

    Args:
        cache: a JSON file of the sizes found, or None to store nothing. An unreadable file counts as empty; if it cannot be
            written, there is a warning.
        about: what else the size depends on, such as how the model is compiled.
    """

    def __init__(self, cache: Path | None, about: Any = None) -> None:
        self._cache, self.about, self._key = cache, about, ""

    @classmethod
    def attachment(cls, cache: Path | None, about: Any = None) -> Attachment:
        """Return it as an attached plug-in."""
        return Attachment("callbacks", "auto-microbatch", cls(cache, about))

    def gradients(self, state: State) -> bool:
        """Call :func:`hocket.loop.actions.compute_gradients`. If memory runs out, halve the microbatch from now on.

        With several ranks it raises torch.OutOfMemoryError instead: the others may be in the middle of a collective. The next
        run begins with the half.
        """
        step = state.step
        if state.microbatch is None:
            full_batch, samples = step.batch, step.samples
            if type(full_batch) is Window and samples:  # its batches are separate microbatches
                step.batch = max(full_batch.batches, key=lambda each: count(state, each).samples)
                samples = count(state, step.batch).samples
            stored = None
            if self._cache is not None and state.strategy.rank == 0:
                key = _key(state, step.batch)
                stored = key, _read(self._cache).get(key)
            self._key, known = state.bus.broadcast_object(stored) or ("", None)
            size = largest_microbatch(state, samples, known)
            step.batch = full_batch
            if state.strategy.rank == 0 and size != known:
                self._store(size)
            state.request_microbatch(size)
        whole, tried = step.batch, [state.microbatch or step.samples]
        once = None if step.metrics is None else _OncePerSample(state, step.metrics)
        logged = state.aggregates.snapshot()

        def split(batch: Batch) -> list[Any]:
            """Split by all sizes tried, one after another: metrics may have seen microbatches of the earlier sizes."""
            microbatches = [batch]
            for size in tried:
                microbatches = [part for each in microbatches for part in state.bus.split_batch(state, each, size)]
            return microbatches

        while True:
            try:
                compute_gradients(state, split, once)
                return True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size, several = tried[-1], state.strategy.world_size > 1
                if size > 1:
                    self._store(size // 2)
                if several:
                    error.add_note(
                        f"Microbatches of {size} samples fitted at first, but not in batch {state.timestamp.batch} on rank "
                        f"{state.strategy.rank}. Start again with microbatch={max(size // 2, 1)}"
                        + ("." if self._cache is None else ", which microbatch='auto' begins with in the next run.")
                    )
                if size == 1 or several:
                    raise
            # Outside of the except block: the error, and with it the graph of the failed attempt, is freed.
            step.batch, step.outputs, step.loss = whole, None, None
            tried.append(size // 2)
            state.request_microbatch(size // 2)
            if once is not None:
                once.restart()
            state.aggregates.restore(logged)
            logged = state.aggregates.snapshot()
            warn(f"Out of memory with {size} samples at once; continuing with {size // 2}.")

    def _store(self, size: int) -> None:
        """Store a size for later runs."""
        if self._cache is None:
            return
        try:
            _write(self._cache, {**_read(self._cache), self._key: size})
        except OSError as error:
            warn(
                f"«microbatch='auto'» found {size}, but cannot store it in {self._cache} for later runs: "
                f"{error.strerror or error}. Training continues; the next run searches again. Make the folder writable, or "
                f"write «microbatch={size}»."
            )


class _OncePerSample:
    """Update metrics once with each sample of a batch, even if the batch is restarted."""

    def __init__(self, state: State, metrics: MetricSet) -> None:
        self._state, self._metrics = state, metrics
        #: Samples that the metrics were updated with, and samples since the latest start of the batch.
        self._updated = self._seen = 0

    def restart(self) -> None:
        self._seen = 0

    def update(self, outputs: Any, batch: Batch) -> None:
        self._seen += count(self._state, batch).samples
        if self._seen > self._updated:
            self._metrics.update(outputs, batch)
            self._updated = self._seen


def largest_microbatch(state: State, mine: int, known: int | None = None) -> int:
    """Return a size that splits the current batch into the fewest microbatches that fit on every rank, evenly sized.

    The size is found by bisection, with forward and backward. A size that an earlier run found is tried first; if it still fits
    on every rank, it is the result.

    Every rank tries on its own, without a collective, so that no rank waits for one that ran out of memory; then they agree
    on the smallest size. Parameters, buffers, gradients, random numbers and plug-ins are restored afterwards.

    Args:
        mine: samples of this rank's batch; 0 for a padding batch.
        known: the size that an earlier run found, the same on all ranks; None if there was none.

    Raises:
        torch.OutOfMemoryError: not even one sample fits, on some rank.
    """
    known = known if isinstance(known, int) and known > 0 else None
    fits = known or 2**62
    if mine:
        most = min(mine, fits)
        found = _bisect(state, state.batch, mine, most)
        fits = found if known is None or found < most else known
    agreed = int(state.bus.all_reduce(torch.tensor(fits), "min").item())
    if not agreed:
        raise torch.OutOfMemoryError(
            f"Not even one sample fits on {state.device} together with the model's gradients and the optimizer's state. Use a "
            "smaller model or samples, a precision of 16 bits, or a strategy that shards parameters."
        )
    return agreed


def _bisect(state: State, batch: Batch, samples: int, most: int) -> int:
    """Return the best size up to ``most``, or 0 if none fits. If a size does not fit, larger ones are assumed not to either."""
    if fits(state, batch, most):
        return most
    largest, too_large = 0, most
    while too_large - largest > 1:
        middle = (largest + too_large) // 2
        if fits(state, batch, middle):
            largest = middle
        else:
            too_large = middle
    return evenly(samples, largest) if largest else 0


def evenly(samples: int, most: int) -> int:
    """Return the size of the fewest microbatches of at most so many samples, evenly sized.

    If 31 of 32 samples fit, use 16 twice: a microbatch of one sample would be slow, and too small for batch norm.
    """
    return math.ceil(samples / math.ceil(samples / most))


def fits(state: State, batch: Batch, size: int) -> bool:
    """Whether a microbatch of so many samples of a batch fits in memory, with gradients and the optimizer's state.

    Forward and backward run on this rank alone, and leave no trace.
    """
    # Most optimizers allocate two more values for each parameter in their first step.
    reserved = [
        torch.empty_like(parameter)
        for optimizer in state.optimizers
        if not optimizer.state
        for group in optimizer.param_groups
        for parameter in group["params"] * 2
    ]
    try:
        with _run_state_preserved(state), without_trace(state.task, watch=False):
            return _try(state, batch, size)
    finally:
        del reserved
        state.bus.zero_grad(state)
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()


def _try(state: State, batch: Batch, size: int) -> bool:
    """Whether forward, loss and backward of a microbatch fit in memory, as in training, plug-ins included.

    It is a separate function because a caught error keeps the graph alive until the function returns.
    """
    bus, step, prepared, carry = state.bus, state.step, state.prepared, state.step.carry
    # The task itself, because the module that the strategy prepared may wait for other ranks.
    state.prepared = state.task
    try:
        microbatches = bus.split_batch(state, batch, size)
        if isinstance(step, UserStep):
            step.carry = split_carry(state, microbatches, lambda carried: bus.split_batch(state, carried, size))[0]
        for _ in range(2):  # the second runs while the gradients of the first occupy memory
            with bus.accumulate(prepared, False):
                compute_microbatch(state, microbatches[0], size, None, None)
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        state.prepared, state.batch, state.outputs, state.loss = prepared, batch, None, None
        if isinstance(step, UserStep):
            step.carry = carry


@contextmanager
def _run_state_preserved(state: State) -> Iterator[None]:
    """Restore random numbers, logged values and the state of plug-ins that act on microbatches afterwards."""
    acting = [
        attachment.obj for attachment in state.bus.attachments
        if has_state(attachment.obj)
        and _MICROBATCH_HOOKS & {*dir(type(attachment.obj)), *(event.value for event in getattr(attachment.obj, "events", ()))}
    ]  # fmt: skip
    kept = [(plugin, map_tensors(lambda tensor: tensor.to("cpu", copy=True), plugin.state_dict())) for plugin in acting]
    generators, logged = state.generators.state_dict(), dict(state.logged)
    try:
        with seeding.preserved(), state.unlogged():
            yield
    finally:
        for plugin, own in kept:
            plugin.load_state_dict(own)
        for key, now in state.generators.state_dict().items():
            if key not in generators:  # first drawn from inside
                generator = torch.Generator().set_state(now)
                generators[key] = generator.manual_seed(generator.initial_seed()).get_state()
        state.generators.load_state_dict(generators)
        state.values.logged = logged


#: The hooks that are called for each microbatch, in which a plug-in might change its state.
_MICROBATCH_HOOKS = {
    "convert_batch", "move_batch", "forward", "loss", "scale_loss", "backward", *(event.value for event in MICROBATCH_EVENTS),
}  # fmt: skip


def _key(state: State, batch: Batch) -> str:
    """Return the cache key: a digest of everything that the size depends on, as far as a run can know it."""
    shapes: list[Any] = []
    map_tensors(lambda tensor: shapes.append((tuple(tensor.shape), str(tensor.dtype))), batch)
    kind = state.device.type
    if kind == "cuda":
        kind = (
            f"{torch.cuda.get_device_name(state.device)} {torch.cuda.get_device_properties(state.device).total_memory} "
            f"{torch.cuda.get_per_process_memory_fraction(state.device)}"
        )
    acting = [each for each in state.bus.attachments if each.kind != "loggers"]
    about = [each.obj.about for each in acting if isinstance(each.obj, AutoMicrobatch)]
    held: dict[int, list[str]] = {}
    for each in [*(each.obj for each in acting if each.instance and each.kind != "callbacks"), *state.task.modules()]:
        _describe(each, held)
    options = [
        (type(optimizer).__qualname__, {name: value for name, value in group.items() if name not in _NOT_OF_MEMORY})
        for optimizer in state.optimizers
        for group in optimizer.param_groups
    ]
    environment = {name: value for name, value in os.environ.items() if name.startswith("PYTORCH_") and "ALLOC" in name}
    described = (
        repr(state.task), same_on_ranks.shapes(state.task), list(held.values()), same_on_ranks.of_plugins(acting), options,
        same_on_ranks.text(getattr(state.task, "loss_function", None)), state.clipping, about, shapes, kind,
        state.strategy.world_size, torch.__version__, environment,
    )  # fmt: skip
    digest = hashlib.sha256(same_on_ranks.text(described).encode()).hexdigest()
    return f"{type(state.model).__name__}-{digest[:16]}"


#: Options of optimizers that differ from run to run, and change no size.
_NOT_OF_MEMORY = {"params", "lr", "initial_lr", "name"}


def _describe(item: Any, held: dict[int, list[str]]) -> None:
    """Describe the plain attributes of an object, and those of its configurations, such as a module's ``config``."""
    if id(item) in held:
        return
    found = held[id(item)] = [type(item).__qualname__]
    for name, value in sorted(getattr(item, "__dict__", {}).items()):
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            found.append(f"{name}={value}")
        elif name == "config":
            _describe(value, held)


def _write(cache: Path, content: dict[str, Any]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    safe_files.replace(cache, json.dumps(content, indent=1) + "\n")


def _read(cache: Path) -> dict[str, Any]:
    try:
        found = safe_files.parsed(safe_files.content(cache))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
