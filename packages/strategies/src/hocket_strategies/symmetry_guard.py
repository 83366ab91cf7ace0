"""Report diverging ranks, instead of letting them wait for each other."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any, NoReturn

from torch import Tensor

from hocket import Callback, State, hookimpl
from hocket.errors import WrongState


class SymmetryError(WrongState):
    """Raised when ranks are about to do different things."""


class SymmetryGuard(Callback):
    """Compare ranks, for debugging: each collective before it is called, and the position of the run after each batch.

    Ranks must call the same collectives in the same order. If one calls a different or an additional collective, all wait
    until the timeout of the process group. With this callback all ranks raise SymmetryError at once. The message names each
    rank's next call, its caller, and the number of matching calls before. It doubles the number of collectives. Collectives
    inside torch, such as gradient reduction, are not checked.

    Example:
        >>> import hocket, torch
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, callbacks=["symmetry-guard"], device="cpu")
    """

    def __init__(self) -> None:
        self._state: State | None = None
        self._matched = 0

    def fit_start(self, state: State) -> None:
        """Start comparing."""
        self._state = state

    def eval_standalone_start(self, state: State) -> None:
        """Start comparing."""
        self._state = state

    def close(self, state: State) -> None:
        """Stop comparing."""
        self._state = None

    @hookimpl(wrapper=True)
    def all_reduce(self, tensor: Tensor, op: str) -> Generator[None, Any, Any]:
        """Compare the operation, and the tensor's shape and dtype."""
        self._compare(f"all_reduce('{op}') of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        return (yield)

    @hookimpl(wrapper=True)
    def all_gather_object(self) -> Generator[None, Any, Any]:
        """Compare the kind of collective."""
        self._compare("all_gather_object")
        return (yield)

    @hookimpl(wrapper=True)
    def broadcast_object(self) -> Generator[None, Any, Any]:
        """Compare the kind of collective."""
        self._compare("broadcast_object")
        return (yield)

    @hookimpl(wrapper=True)
    def barrier(self) -> Generator[None, Any, Any]:
        """Compare the kind of collective."""
        self._compare("barrier")
        return (yield)

    def batch_end(self, state: State) -> None:
        """Compare the position of the run."""
        now = state.timestamp
        self._compare(
            f"the end of batch {now.batch} of epoch {now.epoch} with {now.sample} samples in all", asked=False
        )

    def _compare(self, what: str, asked: bool = True) -> None:
        state = self._state
        if state is None or state.strategy.world_size == 1:
            return
        mine = f"{what}, called by {_caller(state)}" if asked else what
        past_the_bus: Any = state.strategy  # calls through the bus would be compared again
        everyone = past_the_bus.all_gather_object(mine)
        if len(set(everyone)) > 1:
            self._raise_divergence(everyone)
        self._matched += 1

    def _raise_divergence(self, everyone: list[str]) -> NoReturn:
        doing: dict[str, list[str]] = {}
        for rank, what in enumerate(everyone):
            doing.setdefault(what, []).append(str(rank))
        rarest_first = sorted(doing.items(), key=lambda item: len(item[1]))
        found = "; ".join(f"rank {', '.join(ranks)}: {what}" for what, ranks in rarest_first)
        raise SymmetryError(
            f"Ranks diverged after {self._matched} identical collectives and batches. {found}. Every rank has to call the "
            "same collectives in the same order: look for an `if` that depends on the rank, or on per-rank data."
        )


def _caller(state: State) -> str:
    """Return the nearest attached plug-in on the stack, or the loop."""
    plugins = {
        id(attachment.obj): attachment
        for attachment in state.bus.attachments
        if attachment.kind not in ("strategies", "actions")
    }
    frame = sys._getframe(1)
    while frame is not None:
        attachment = plugins.get(id(frame.f_locals.get("self")))
        if attachment is not None and not isinstance(attachment.obj, SymmetryGuard):
            return f"{attachment.kind.removesuffix('s')} '{attachment.name}' in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the loop"
