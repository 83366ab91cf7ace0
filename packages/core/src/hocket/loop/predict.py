"""Prediction: outputs for every batch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch

from hocket.basics import seeding
from hocket.data.adapters import adapt, prepared
from hocket.data.batches import unpadded
from hocket.data.nesting import map_tensors
from hocket.data.samplers import DRAWN
from hocket.data.source import limited, one_epoch
from hocket.data.training_iterator import ENDLESS
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.loop.graphs import keep_gradients
from hocket.loop.modes import eval_mode
from hocket.state.state import State


def predict(state: State, data: Iterable[Any], limit: float | None = None, keep: bool = True) -> list[Any]:
    """Return the outputs for each batch, on the CPU, if they are kept; with several ranks, for this rank's slices of the data.

    The modes of submodules, the current batch and the global random numbers are restored, after exceptions too.
    """
    bus = state.bus
    outputs = []
    if state.overwrites:
        keep_gradients(state.parameters, {})
    source = adapt(prepared(data, bus.prepare_data, False), given=data)
    if isinstance(data, ENDLESS) and limit is None:
        raise WrongValue(
            f"predict(data) was given data that never ends ({type(data).__name__}). Pass data that does, or limit it: "
            "limit_predict=100."
        )
    if isinstance(getattr(data, "sampler", None), DRAWN):
        warn(
            f"predict(data) was given a {type(data).__name__} that draws samples in random order, and outputs are in that "
            "order. For the order of the data set, give it «shuffle=False»."
        )
    with (
        state.another_step() as step,
        state.unlogged(),
        seeding.preserved(),
        eval_mode(state.task),
        torch.no_grad(),
        one_epoch(source) as batches,
    ):
        bus.predict_start(state)
        for batch in islice(batches, limited(source, limit, "limit_predict")):
            step.batch, is_real = unpadded(batch)
            bus.predict_batch_start(state)
            step.batch = bus.move_batch(state, step.batch)
            bus.predict_before_forward(state)
            step.outputs = bus.eval_forward(state, step.batch)
            bus.predict_after_forward(state)
            if is_real and keep:
                outputs.append(map_tensors(lambda tensor: tensor.cpu(), step.outputs))
            bus.predict_batch_end(state)
        bus.predict_end(state)
        state.borrowed.check_returned("predict_end")
    return outputs
