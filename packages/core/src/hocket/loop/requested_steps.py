"""Train on one batch in several optimizer steps, each on a part of it; see `State.request_steps`."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hocket.data.batches import Window, unpadded
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs.strategies import replicas
from hocket.state.state import State
from hocket.state.step import count, miscounted
from hocket.state.task import Task


class _Part(NamedTuple):
    """A part of the batch, the number of its samples on this rank, and on all ranks together."""

    batch: Any
    samples: int
    everyone: int


def take_requested_steps(state: State, number: int, take: Callable[[], bool]) -> bool:
    """Divide the current batch into ``number`` parts, and call ``take`` for a step on each. Return whether one was taken.

    Afterwards ``state.step`` has the batch again, and the mean loss over its parts.
    """
    step = state.step
    batch, samples, everyone, metrics = step.batch, step.samples, step.trained_on, step.metrics
    taken = False
    loss: Any = 0.0
    losses: Mapping[str, torch.Tensor] = {}
    try:
        for step.part, part in enumerate(_parts(state, number)):
            step.batch, step.samples, step.trained_on = part
            step.metrics = metrics  # None after gradients were computed twice
            taken |= take()
            share = part.everyone / everyone
            assert step.loss is not None
            loss = loss + step.loss * share
            parts = {name: value * share for name, value in step.losses.items()}
            losses = {**losses, **{name: losses.get(name, 0) + value for name, value in parts.items()}}
    finally:
        step.batch, step.samples, step.trained_on, step.part = batch, samples, everyone, 0
    step.loss, step.losses = loss, losses
    return taken


def _parts(state: State, number: int) -> Iterator[_Part]:
    """Yield the parts that hold a sample on any rank. A rank without one in a part computes on padding."""
    parts, samples = _divided(state, _sizes(state, number))
    totals = samples
    if state.strategy.world_size > 1:
        copies = replicas(state.strategy)
        totals = [total // copies for total in state.bus.all_reduce(torch.tensor(samples), "sum").tolist()]
    if sum(totals) < number and state.strategy.rank == 0:
        warn(
            f"{number} steps were requested on a batch of {sum(totals)} samples, and {sum(map(bool, totals))} are taken: each "
            "needs a sample. Give larger batches, or request fewer steps, as with a larger initial= of batch-size-warmup."
        )
    padding = next((part for part, size in zip(parts, samples, strict=True) if size), state.step.batch)
    for part, size, everyone in zip(parts, samples, totals, strict=True):
        if everyone:
            yield _Part(part if size else padding, size, everyone)


def _sizes(state: State, number: int) -> list[int]:
    """Return the sizes of this rank's parts, equal up to one. Ranks have larger parts in turn, so that sums are equal too."""
    size, larger = divmod(state.step.samples, number)
    first = state.strategy.data_rank * larger
    return [size + ((part - first) % number < larger) for part in range(number)]


def _divided(state: State, sizes: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Return this rank's batch in parts of these sizes, and their sizes if the task splits in another way.

    Parts of a window are windows. The batch is split into equal pieces that lie in one part each, which are joined again;
    or, by a task that splits in its own way and cannot join, into as many pieces as parts, so that the last may be smaller.
    """
    batch, samples = state.step.batch, state.step.samples
    window = type(batch) is Window
    whole = [count(state, loaded).samples for loaded in batch.batches] if window and samples else [samples]
    starts, ends = list(accumulate(whole, initial=0)), list(accumulate(sizes))
    kind = type(state.task)
    if kind.split is not Task.split and kind.join is Task.join:
        piece_size = max(1, -(-samples // len(sizes)))
    else:
        piece_size = math.gcd(*(end - starts[bisect(starts, end) - 1] for end in ends)) or max(samples, 1)
    held: list[dict[int, list[Any]]] = [{} for _ in sizes]  # by part, and by batch of the window
    counted = [0] * len(sizes)
    seen = 0
    split = state.bus.split_batch(state, batch, piece_size)  # collective, so on a rank without samples too
    for piece in split if samples else ():
        piece, is_real = unpadded(piece)
        if is_real:
            part = min(bisect(ends, seen), len(sizes) - 1)
            held[part].setdefault(bisect(starts, seen), []).append(piece)
            piece_samples = count(state, piece).samples
            counted[part] += piece_samples
            seen += piece_samples
    if seen != samples:
        raise WrongValue(miscounted(state, samples, samples - seen))
    parts = [[state.task.join(pieces) if len(pieces) > 1 else pieces[0] for pieces in part.values()] for part in held]
    return [Window(joined) if window else joined[0] if joined else None for joined in parts], counted
