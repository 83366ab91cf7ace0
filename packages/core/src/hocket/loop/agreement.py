"""Agreement between ranks during training: batch counts, requests and time."""

from __future__ import annotations

import torch

from hocket.data.batches import Counts
from hocket.help import warn
from hocket.hookspecs.strategies import replicas
from hocket.state import log_names
from hocket.state.ranks import Ranks
from hocket.state.requests import Decision
from hocket.state.state import State

_DECISIONS = (Decision.STOP, Decision.SKIP_BATCH, Decision.EVALUATE, Decision.CHECKPOINT)


def total(state: State, loaded: Counts, trained_on: int, skip: bool) -> tuple[Counts, int, bool]:
    """Return the totals over all ranks: counts of the batch, samples trained on, and whether any rank skips the batch."""
    # int64 on the CPU: exact, and no rank waits for its device.
    sent = torch.tensor([loaded.samples, loaded.tokens, trained_on, int(skip)])
    *counts, skips = state.bus.all_reduce(sent, "sum").tolist()
    copies = replicas(state.strategy)
    samples, tokens, trained = (count // copies for count in counts)
    return Counts(samples, tokens), trained, bool(skips)


def decide(state: State) -> None:
    """Apply the requests of any rank on all ranks, and set the seconds of the batch to their mean over ranks.

    Time is then identical on all ranks, which also know whether any of them has logged a value with a reduction.
    """
    world = state.strategy.world_size
    if world == 1:
        return
    now = state.timestamp
    fingerprint = state.strategy.fingerprint()
    requests = [float(bool(state.requests.pending & decision)) for decision in _DECISIONS]
    values = [*requests, float(state.aggregates.used), now.batch_seconds, fingerprint]
    sent = torch.tensor(values, dtype=torch.float64)
    *requested, aggregates, seconds, fingerprints = state.bus.all_reduce(sent, "sum").tolist()
    state.aggregates.agreed |= bool(aggregates)
    if fingerprints != fingerprint * world:
        state.strategy.diverged()
    for decision, asked in zip(_DECISIONS, requested, strict=True):
        if asked:
            state.request(decision)
    late = seconds / world - now.batch_seconds
    now.seconds += late
    now.epoch_seconds += late
    now.batch_seconds += late


def share_aggregates(state: State) -> None:
    """Let all ranks know whether any has logged a value with a reduction, as `decide` does after each batch."""
    logged = state.aggregates
    if state.strategy.world_size > 1 and not logged.agreed:
        logged.agreed = bool(state.bus.all_reduce(torch.tensor(int(logged.used)), "sum").item())


def ranks_of(state: State) -> Ranks:
    """Return the `Ranks` of a run; all ranks have to make the same calls on it."""
    return Ranks(state.strategy.rank, state.strategy.world_size, state.bus.all_gather_object)


def compare_names(state: State) -> None:
    """Warn about names that other ranks than 0 alone have logged without a reduction. All ranks call it."""
    if state.strategy.world_size == 1:
        return
    names = state.bus.all_gather_object(sorted(state.aggregates.plain))
    if state.strategy.rank == 0:
        for name in sorted({name for of_rank in names for name in of_rank}.difference(names[0])):
            ranks = [rank for rank, of_rank in enumerate(names) if name in of_rank]
            warn(log_names.lost(name, ranks))
