"""Checked by mypy in `nox -s lint`, never run: calls of the bus are typed, so what is wrong here must be found.

Each line that is wrong ignores the error that it should give; an ignored error that is not there is an error itself.
"""

from __future__ import annotations

from typing import assert_type

import torch

from hocket import Precision, State, Strategy
from hocket.basics.losses import Loss
from hocket.hookspecs import PrecisionLike, StrategyLike


def calls(state: State, outputs: torch.Tensor) -> None:
    bus = state.bus
    bus.batch_end(state)
    assert_type(bus.loss(state, outputs, None), Loss)
    bus.batch_ned(state)  # type: ignore[attr-defined]
    bus.batch_end()  # type: ignore[call-arg]
    bus.batch_end(state=state)  # type: ignore[call-arg]
    bus.backward(outputs, state)  # type: ignore[arg-type]
    bus.split_batch(state, None, "8")  # type: ignore[arg-type]


def contracts(strategy: Strategy, precision: Precision, state: State) -> None:
    """The base classes are what the contract asks for."""
    like: StrategyLike = strategy
    numbers: PrecisionLike = precision
    assert_type(state.strategy.data_rank, int)
    state.strategy.data_rnak  # type: ignore[attr-defined]  # noqa: B018
    like, numbers = numbers, like  # type: ignore[assignment]
