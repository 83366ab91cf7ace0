"""What ranks agree on while they train."""

from __future__ import annotations

import torch

from hocket.checkpoints.storage.ranks import Ranks
from hocket.data.batches import Counts
from hocket.state import State
from hocket.training.requests import Decision

_DECISIONS = (Decision.STOP, Decision.SKIP_BATCH, Decision.EVALUATE, Decision.CHECKPOINT)


def total(state: State, handed_out: Counts, trained_on: int, skip: bool) -> tuple[Counts, int, bool]:
    """Over all ranks: what the batch counts for, how many of its samples are trained on, whether any rank skips it."""
    # int64 on the CPU: exact, and no rank waits for its device.
    mine = torch.tensor([handed_out.samples, handed_out.tokens, trained_on, int(skip)])
    *counts, skips = state.bus.all_reduce(mine, "sum").tolist()
    # Ranks that compute on the same share have all counted it.
    alike = state.strategy.world_size // state.strategy.data_ranks
    samples, tokens, trained = (count // alike for count in counts)
    return Counts(samples, tokens), trained, bool(skips)


def decide(state: State) -> None:
    """One rank's request is every rank's; the seconds of the batch are the mean over ranks, so that time is the same too."""
    world = state.strategy.world_size
    if world == 1:
        return
    now = state.timestamp
    fingerprint = state.strategy.fingerprint()
    mine = torch.tensor(
        [*(float(bool(state.requests.pending & d)) for d in _DECISIONS), now.batch_seconds, fingerprint],
        dtype=torch.float64,
    )
    *requested, seconds, fingerprints = state.bus.all_reduce(mine, "sum").tolist()
    if fingerprints != fingerprint * world:
        state.strategy.diverged()
    for decision, asked in zip(_DECISIONS, requested, strict=True):
        if asked:
            state.request(decision)
    late = seconds / world - now.batch_seconds
    now.seconds += late
    now.epoch_seconds += late
    now.batch_seconds += late


def ranks_of(state: State) -> Ranks:
    """Return the ranks of a run, which all have to call the same."""
    return Ranks(state.strategy.rank, state.strategy.world_size, state.bus.all_gather_object)
