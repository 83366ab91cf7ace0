"""``microbatch="auto"``: the largest that fits in memory, found before the first step, and a smaller one if that was wrong."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hocket.callback import Callback
from hocket.data.batches import map_tensors
from hocket.data.stateful import has_state
from hocket.plugins.spec import Attachment
from hocket.state import State
from hocket.training import seeding
from hocket.training.actions import compute_gradients, compute_microbatch
from hocket.training.means import Weighting
from hocket.training.metrics import MetricSet
from hocket.training.step import count


class AutoMicrobatch(Callback):
    """Answers the action `gradients`: in microbatches that fit.

    Args:
        cache: see :func:`largest_microbatch`.
    """

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache

    @classmethod
    def attachment(cls, cache: Path | None) -> Attachment:
        """It as a plug-in."""
        return Attachment("callbacks", "auto-microbatch", cls(cache))

    def gradients(self, state: State) -> bool:
        """See :func:`hocket.training.actions.compute_gradients`. Where memory runs out, with half the microbatch from now on.

        With several ranks it raises torch.OutOfMemoryError instead: the others may be in the middle of a collective.
        """
        step = state.step
        if state.microbatch is None:
            state.request_microbatch(largest_microbatch(state, step.samples, self._cache))
        whole, tried = step.batch, [state.microbatch or step.samples]
        once = None if step.metrics is None else _Once(state, step.metrics)

        def split(batch: Any) -> list[Any]:
            """Microbatches of the last size tried, within those of the sizes before, which metrics may have seen."""
            pieces = [batch]
            for size in tried:
                pieces = [part for piece in pieces for part in state.bus.split_batch(state, piece, size)]
            return pieces

        while True:
            try:
                compute_gradients(state, split, once)
                return True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                size = tried[-1]
                if state.strategy.world_size > 1:
                    error.add_note(
                        f"Microbatches of {size} samples fitted at first, but not in batch {state.timestamp.batch} on rank "
                        f"{state.strategy.rank}. Start again with microbatch={max(size // 2, 1)}."
                    )
                if size == 1 or state.strategy.world_size > 1:
                    raise
            # The error has gone, and with it the graph of the failed try.
            step.batch, step.outputs, step.loss = whole, None, None
            tried.append(size // 2)
            state.request_microbatch(size // 2)
            if once is not None:
                once.begin_again()
            warnings.warn(f"Out of memory with {size} samples at once; going on with {size // 2}.", stacklevel=2)


class _Once:
    """Shows metrics each sample of a batch once, although the batch is begun again."""

    def __init__(self, state: State, metrics: MetricSet) -> None:
        self._state, self._metrics = state, metrics
        self._shown = self._passed = 0

    def begin_again(self) -> None:
        self._passed = 0

    def update(self, outputs: Any, batch: Any) -> None:
        self._passed += count(self._state, batch).samples
        if self._passed > self._shown:
            self._metrics.update(outputs, batch)
            self._shown = self._passed


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a device, or of the host, ran out. Libraries below torch, and mps, raise a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


#: Of mps, xpu and the CUDA runtime; of cuDNN, cuBLAS and cuSPARSE (``CUBLAS_STATUS_ALLOC_FAILED``); of torch's CPU allocator.
_OUT_OF_MEMORY = ("out of memory", "_STATUS_ALLOC_FAILED", "can't allocate memory")


def largest_microbatch(state: State, mine: int, cache: Path | None) -> int:
    """A size with which the batch under way is cut into as few microbatches as fit, on every rank, and as even ones.

    It is found by bisection, with forward and backward.

    Every rank tries alone, without a collective, so none waits for one that ran out of memory; then they agree on the
    smallest. Parameters, buffers, gradients, random numbers and plug-ins do not notice. What was found is kept in ``cache``
    for runs of the same model, batch shapes, precision, kind of device and number of ranks.

    Args:
        mine: samples of this rank's batch; 0 for one without a share.
        cache: a JSON file, or None to keep nothing. One that cannot be read counts as empty; if it cannot be written, there is
            a warning.

    Raises:
        torch.OutOfMemoryError: not even one sample fits, on some rank.
    """
    bus, batch = state.bus, state.batch
    key = _key(state, batch)
    known = bus.broadcast_object(None if cache is None or state.strategy.rank else _read(cache).get(key))
    if isinstance(known, int) and known > 0:
        return known
    fits = _bisect(state, batch, mine) if mine else 2**62
    agreed = int(bus.all_reduce(torch.tensor(fits), "min").item())
    if not agreed:
        raise torch.OutOfMemoryError(
            f"Not even one sample fits on {state.device} together with the model's gradients and the optimizer's state. Use a "
            "smaller model or samples, a precision of 16 bits, or a strategy that shards parameters."
        )
    if cache is not None and state.strategy.rank == 0:
        try:
            _write(cache, {**_read(cache), key: agreed})
        except OSError as error:
            warnings.warn(
                f"microbatch='auto' found {agreed}, and cannot keep that in {cache} for later runs: {error.strerror or error}. "
                "Training goes on; the next run looks again.",
                stacklevel=2,
            )
    return agreed


def _bisect(state: State, batch: Any, samples: int) -> int:
    """The best size, 0 for none; what is larger than something that does not fit is taken not to fit either."""
    if _fits(state, batch, samples):
        return samples
    fits, too_large = 0, samples
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if _fits(state, batch, middle):
            fits = middle
        else:
            too_large = middle
    # 32 samples of which 31 fit are twice 16: a piece of one would be slow, and too small for batch norm.
    return math.ceil(samples / math.ceil(samples / fits)) if fits else 0


def _fits(state: State, batch: Any, size: int) -> bool:
    buffers = [(buffer, buffer.clone()) for buffer in state.task.buffers()]
    # Most optimizers keep two more values for each parameter, from their first step on.
    reserved = [
        torch.empty_like(parameter)
        for optimizer in state.optimizers
        if not optimizer.state
        for group in optimizer.param_groups
        for parameter in group["params"] * 2
    ]
    try:
        with _unnoticed(state):
            return _try(state, batch, size)
    finally:
        del reserved
        state.bus.zero_grad(state)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()


def _try(state: State, batch: Any, size: int) -> bool:
    """Whether forward, loss and backward of a microbatch fit, as in training, plug-ins included.

    A function of its own: an error that it catches holds the graph until it returns.
    """
    bus, prepared = state.bus, state.prepared
    # The task itself: what the strategy made of it may wait for other ranks.
    state.prepared = state.task
    try:
        for _ in range(2):  # gradients of the first are there during the second
            with bus.accumulate(prepared, False):
                compute_microbatch(state, bus.split_batch(state, batch, size)[0], size, Weighting(1), None)
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        state.prepared, state.batch, state.outputs, state.loss = prepared, batch, None, None


@contextmanager
def _unnoticed(state: State) -> Iterator[None]:
    """Random numbers, what was logged, and the state of plug-ins that act on microbatches, are afterwards as before."""
    acting = [
        attachment.obj for attachment in state.bus.attachments
        if has_state(attachment.obj)
        and _OF_MICROBATCHES & {*dir(type(attachment.obj)), *(event.value for event in getattr(attachment.obj, "events", ()))}
    ]  # fmt: skip
    kept = [(plugin, map_tensors(lambda tensor: tensor.to("cpu", copy=True), plugin.state_dict())) for plugin in acting]
    generators, logged = state.generators.state_dict(), dict(state.logged)
    try:
        with seeding.preserved():
            yield
    finally:
        for plugin, own in kept:
            plugin.load_state_dict(own)
        for key, now in state.generators.state_dict().items():
            if key not in generators:  # first drawn from inside
                generator = torch.Generator().set_state(now)
                generators[key] = generator.manual_seed(generator.initial_seed()).get_state()
        state.generators.load_state_dict(generators)
        state.logged = logged


#: The hooks that are called for each microbatch, in which a plug-in might remember something.
_OF_MICROBATCHES = {
    "convert_batch", "move_batch", "before_forward", "forward", "after_forward", "before_loss", "loss", "after_loss",
    "before_backward", "scale_loss", "backward", "after_backward",
}  # fmt: skip


def _key(state: State, batch: Any) -> str:
    """What the answer depends on, as a short text."""
    shapes: list[Any] = []
    map_tensors(lambda tensor: shapes.append((tuple(tensor.shape), str(tensor.dtype))), batch)
    parameters = [(name, tuple(value.shape), str(value.dtype)) for name, value in state.model.named_parameters()]
    kind = state.device.type
    if kind == "cuda":
        kind = (
            f"{torch.cuda.get_device_name(state.device)} {torch.cuda.get_device_properties(state.device).total_memory}"
        )
    about = (parameters, shapes, kind, type(state.precision).__qualname__, state.strategy.world_size)
    return f"{type(state.model).__name__}-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"


def _write(cache: Path, content: dict[str, Any]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    temporary = cache.with_name(f".{cache.name}.{os.urandom(8).hex()}")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(cache)
    finally:
        temporary.unlink(missing_ok=True)


def _read(cache: Path) -> dict[str, Any]:
    try:
        found = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
