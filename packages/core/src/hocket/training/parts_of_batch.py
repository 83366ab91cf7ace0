"""Train on one batch in several optimizer steps, each on a part of it; see `State.request_steps`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from hocket.data.batches import unpadded
from hocket.data.windows import Window
from hocket.state import State
from hocket.training.actions import miscounted
from hocket.training.step import count


class _Part(NamedTuple):
    """A part of the batch, the number of its samples on this rank, and on all ranks together."""

    batch: Any
    samples: int
    everyone: int


def step_on_parts(state: State, number: int, take: Callable[[], bool]) -> bool:
    """Divide the current batch into ``number`` parts, and call ``take`` for a step on each. Return whether one was taken.

    Afterwards ``state.step`` has the batch again, and the mean loss over its parts.
    """
    step = state.step
    batch, samples, everyone, metrics = step.batch, step.samples, step.trained_on, step.metrics
    taken = False
    loss: Any = 0.0
    losses: Mapping[str, torch.Tensor] = {}
    try:
        for part in _parts(state, number):
            step.batch, step.samples, step.trained_on = part
            step.metrics = metrics  # None after gradients were computed twice
            taken |= take()
            share = part.everyone / everyone
            assert step.loss is not None
            loss = loss + step.loss * share
            parts = {name: value * share for name, value in step.losses.items()}
            losses = {**losses, **{name: losses.get(name, 0) + value for name, value in parts.items()}}
    finally:
        step.batch, step.samples, step.trained_on = batch, samples, everyone
    step.loss, step.losses = loss, losses
    return taken


def _parts(state: State, number: int) -> Iterator[_Part]:
    """Yield parts with about equal numbers of samples. Parts that are empty on all ranks are skipped.

    A rank without samples in a part computes on padding.
    """
    batch, mine = state.step.batch, state.step.samples
    batches: list[list[Any]] = [[] for _ in range(number)]
    samples = [0] * number
    seen = 0
    split = state.bus.split_batch(
        state, batch, max(1, -(-mine // number))
    )  # collective, so on a rank without samples too
    for piece in split if mine else ():
        piece, counts = unpadded(piece)
        if counts:
            which = min(seen * number // mine, number - 1)
            size = count(state, piece).samples
            batches[which].append(piece)
            samples[which] += size
            seen += size
    if seen != mine:
        raise ValueError(miscounted(state, mine, mine - seen))
    totals = samples
    if state.strategy.world_size > 1:
        duplicates = state.strategy.world_size // state.strategy.data_ranks
        totals = [total // duplicates for total in state.bus.all_reduce(torch.tensor(samples), "sum").tolist()]
    padding = next((pieces[0] for pieces in batches if pieces), batch)
    for pieces, size, everyone in zip(batches, samples, totals, strict=True):
        if everyone:
            own = Window(pieces) if type(batch) is Window and pieces else state.task.join(pieces or [padding])
            yield _Part(own, size, everyone)
