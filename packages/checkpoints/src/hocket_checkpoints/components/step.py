"""The results of the latest step, which are logged later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hocket.basics.plain_data import encode
from hocket.data.batches import Counts
from hocket.state.component import Check, Component, ContentError, PerRank, Saved, Tree
from hocket.state.state import State
from hocket_checkpoints.components.generic import Decoded


class Batch(Decoded):
    """Samples and tokens of the latest batch, and the norm of its gradients."""

    path = "batch"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return them, over all ranks."""
        state = self._state
        norm = encode(state.gradient_norm)
        return {"samples": state.batch_samples, "tokens": state.batch_tokens, "norm": norm}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set them in the step."""
        step = self._state.step
        step.counts, step.gradient_norm = Counts(saved["samples"], saved["tokens"]), saved["norm"]


class Losses(Component):
    """The latest loss and its parts, on this rank."""

    path, scope = "loss", "rank"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return the loss, and its parts by name."""
        return encode([self._state.loss, dict(self._state.loss_parts)])

    def check(self, saved: PerRank, checkpoint: Saved) -> Check:
        """Accept a loss and its parts; a new rank takes those of rank 0. Raises ContentError for anything else."""
        state = checkpoint.decode(saved.own)
        loss, parts = state if isinstance(state, list | tuple) and len(state) == 2 else ("", "")
        if not isinstance(loss, Tensor | None) or not isinstance(parts, Mapping):
            raise ContentError("The checkpoint's 'loss' is not a loss and its parts by name.")
        return Check(state)

    def load_state_dict(self, saved: list[Any]) -> None:
        """Set them in the step."""
        loss, self._state.step.losses = saved
        self._state.step.loss = None if loss is None else loss.to(self._state.device)


class RankSamples(Component):
    """Samples of the latest batch on this rank."""

    path, scope = "rank_samples", "rank"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return their number."""
        return self._state.rank_samples

    def load_state_dict(self, saved: PerRank) -> None:
        """Set it in the step; a new rank takes that of rank 0."""
        self._state.step.samples = saved.own
