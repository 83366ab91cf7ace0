"""Who diverged, instead of ranks that wait for each other."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any, NoReturn

from torch import Tensor

from hocket import Callback, State, hookimpl


class SymmetryError(RuntimeError):
    """Ranks are about to do different things."""


class SymmetryGuard(Callback):
    """Compares, for debugging, what ranks do: before each collective which one it is, after each batch where the run is.

    Ranks have to call the same collectives in the same order; where one calls another, or one more, all would wait until the
    timeout of the process group. With this callback all raise SymmetryError at once, and the message says what each rank was
    about to do, on whose behalf, and how much was alike before. It costs a collective of its own for each one. What torch
    does by itself, such as reducing gradients, is not seen.

    Example:
        >>> import hocket, torch
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, callbacks=["symmetry-guard"], device="cpu")
    """

    def __init__(self) -> None:
        self._state: State | None = None
        self._alike = 0

    def fit_start(self, state: State) -> None:
        """From here on."""
        self._state = state

    def eval_standalone_start(self, state: State) -> None:
        """From here on."""
        self._state = state

    def close(self, state: State) -> None:
        """No longer."""
        self._state = None

    @hookimpl(wrapper=True)
    def all_reduce(self, tensor: Tensor, op: str) -> Generator[None, Any, Any]:
        """Compares the operation, and the shape and type of what is reduced."""
        self._compare(f"all_reduce('{op}') of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        return (yield)

    @hookimpl(wrapper=True)
    def all_gather_object(self) -> Generator[None, Any, Any]:
        """Compares that it is one."""
        self._compare("all_gather_object")
        return (yield)

    @hookimpl(wrapper=True)
    def broadcast_object(self) -> Generator[None, Any, Any]:
        """Compares that it is one."""
        self._compare("broadcast_object")
        return (yield)

    @hookimpl(wrapper=True)
    def barrier(self) -> Generator[None, Any, Any]:
        """Compares that it is one."""
        self._compare("barrier")
        return (yield)

    def batch_end(self, state: State) -> None:
        """Compares where the run is."""
        now = state.timestamp
        self._compare(
            f"the end of batch {now.batch} of epoch {now.epoch} with {now.sample} samples in all", asked=False
        )

    def _compare(self, what: str, asked: bool = True) -> None:
        state = self._state
        if state is None or state.strategy.world_size == 1:
            return
        mine = f"{what}, called by {_caller(state)}" if asked else what
        past_the_bus: Any = state.strategy  # on which this listens
        everyone = past_the_bus.all_gather_object(mine)
        if len(set(everyone)) > 1:
            self._speak(everyone)
        self._alike += 1

    def _speak(self, everyone: list[str]) -> NoReturn:
        doing: dict[str, list[str]] = {}
        for rank, what in enumerate(everyone):
            doing.setdefault(what, []).append(str(rank))
        rarest_first = sorted(doing.items(), key=lambda item: len(item[1]))
        found = "; ".join(f"rank {', '.join(ranks)}: {what}" for what, ranks in rarest_first)
        raise SymmetryError(
            f"Ranks diverged after {self._alike} collectives and batches that were alike. {found}. Every rank has to call the "
            "same collectives in the same order: look for an `if` that depends on the rank, or on data that ranks do not share."
        )


def _caller(state: State) -> str:
    """The attached plug-in that is nearest on the stack, or the loop."""
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
