"""Two Trainers in one process do not notice each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import hocket
from hocket.seeding import RandomStream


def make(data: Any, model: Any, seed: int) -> hocket.Trainer:
    """With everything that draws random numbers; loaders without a generator of their own."""
    loader = torch.utils.data.DataLoader(data().dataset, 16, shuffle=True)
    return hocket.Trainer(
        model=model(dropout=0.3),
        loss=F.cross_entropy,
        train_data=loader,
        eval_data={"test": data(20)},
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        schedule="cosine",
        duration="3ep",
        eval_every="4ba",
        algorithms=["ema", "label-smoothing", "sam"],
        seed=seed,
    )


def weights(trainer: hocket.Trainer) -> list[Tensor]:
    return [tensor.clone() for tensor in trainer.model_state_dict().values()]


def test_alternating_fits_end_with_the_weights_each_has_alone(data, model) -> None:
    alone = []
    for seed in (1, 2):
        trainer = make(data, model, seed)
        trainer.fit()
        alone.append(weights(trainer))
    first, second = make(data, model, 1), make(data, model, 2)
    for _ in range(9):
        first.fit("2ba")
        torch.rand(3)  # what the process draws in between does not matter either
        second.fit("2ba")
    for trainer, expected in zip((first, second), alone, strict=True):
        assert trainer.state.timestamp.batch == 18
        assert all(torch.equal(a, b) for a, b in zip(weights(trainer), expected, strict=True))


def test_a_seed_leaves_the_callers_random_numbers_alone(data, model) -> None:
    torch.manual_seed(9)
    expected = torch.rand(4)
    torch.manual_seed(9)
    make(data, model, 1).fit()
    assert torch.equal(torch.rand(4), expected)


def test_every_seed_works(data, model) -> None:
    """composer.md 3.2: seed 2**32 - 1 with a rank added was an error."""
    make(data, model, 2**32 - 1).fit("1ba")
    stream = RandomStream(2**32 - 1, rank=3)
    with stream:
        torch.rand(1)


def test_trainers_share_no_plugins(data, model) -> None:
    first, second = make(data, model, 1), make(data, model, 2)
    assert not {voice.obj for voice in first.state.bus.voices} & {voice.obj for voice in second.state.bus.voices}
