"""A fit warns of algorithms whose schedule left them nothing to do, and of no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import hocket
from hocket_general import (
    EMA,
    SAM,
    SWA,
    BatchSizeWarmup,
    Distillation,
    LabelSmoothing,
    LayerFreezing,
    LossSpikeGuard,
    SelectiveBackprop,
)

LAYERS = 4


def train(algorithm: Callable[[], hocket.Algorithm], resumed: bool = False) -> list[str]:
    """The warnings of training for ten batches, five an epoch."""

    def make() -> hocket.Trainer:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(4, 4), nn.ReLU())]
        return hocket.Trainer(
            model=nn.Sequential(*layers), loss="cross_entropy", optimizer="sgd(lr=0.1)", duration="2ep", device="cpu",
            train_data=[(torch.randn(8, 4), torch.arange(8) % 4) for _ in range(5)], algorithms=[algorithm()], seed=0,
        )  # fmt: skip

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hocket.NoEffectWarning)
        trainer = make()
        if resumed:
            trainer.fit("7ba")
            state = trainer.state_dict()
            trainer = make()
            trainer.load_state_dict(state)
        trainer.fit()
    return [str(each.message) for each in caught if each.category is hocket.NoEffectWarning]


NOTHING = [
    (lambda: SAM(interval=11), "sam has no effect: none of its 10 batches is an interval=11-th one"),
    (lambda: SAM(interval=4, start="8ba"), "sam has no effect: none of its 2 batches is an interval=4-th one"),
    (lambda: SAM(start="0.91dur", stop="0.99dur"), "sam has no effect: none of the 10 batches is in Span"),
    (lambda: LabelSmoothing(start="0.41dur", stop="0.49dur"), "none of the 10 batches is in Span"),
    (lambda: LabelSmoothing(start="5ba", stop="0.5dur"), "none of the 10 batches is in Span"),
    (lambda: Distillation(nn.Linear(4, 4), start="1ep", stop="5ba"), "none of the 10 batches is in Span"),
    (lambda: SelectiveBackprop(start="1ba", stop="2ba"), "interrupt=2 skips all 1 batches"),
    (lambda: SelectiveBackprop(keep=1.0), "keep=1 selects all samples"),
    (
        lambda: LayerFreezing(start="0.9dur"),
        "layer-freezing has no effect: from start='0.9dur' on, the 10 batches are over",
    ),
    (LossSpikeGuard, "loss-spike-guard has no effect: warmup=20 batches come before"),
    (lambda: BatchSizeWarmup(initial=1.0), "batch-size-warmup has no effect: it begins with the full batch"),
    (lambda: SWA(start="0.9dur"), "SWA averages nothing"),
    (lambda: SWA(start="1ep", update_interval="2ep"), "SWA averages nothing"),
    (lambda: EMA(start="0.95dur", half_life="2ba"), "EMA averages nothing"),
]


@pytest.mark.parametrize(("make", "told"), NOTHING)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_schedule_that_does_nothing_is_said_once(make, told, resumed):
    (message,) = train(make, resumed)
    assert told in message


@pytest.mark.parametrize(
    "make",
    [
        lambda: SAM(interval=10),
        lambda: SAM(interval=4, start="7ba", stop="8ba"),
        lambda: LabelSmoothing(start="0.4dur", stop="0.45dur"),
        lambda: LabelSmoothing(start="0.9dur"),
        lambda: LabelSmoothing(start="1ep", stop="6ba"),
        lambda: LabelSmoothing(start="70sp", stop="71sp"),
        lambda: SelectiveBackprop(start="0ba", stop="1ba"),
        lambda: SelectiveBackprop(start="4ba", stop="6ba"),
        lambda: LayerFreezing(start="0.5dur"),
        lambda: LossSpikeGuard(warmup=9),
        BatchSizeWarmup,
        lambda: SWA(start="0.5dur"),
        lambda: EMA(half_life="2ba", start="0.5dur"),
    ],
)
def test_a_schedule_that_does_something_is_not_warned_of(make):
    assert train(make) == [] and train(make, resumed=True) == []


def test_layers_that_freeze_are_those_that_are_not_warned_of():
    """The count of the warning is that of the freezing."""
    for start in range(1, 10):
        frozen = []

        class Watch(LayerFreezing):
            def apply(self, event, state, frozen=frozen):
                super().apply(event, state)
                frozen.append(not all(each.requires_grad for each in state.model.parameters()))

        told = train(partial(Watch, start=f"{start / 10}dur"))
        assert any(frozen) == (told == []), start
