"""Batches cut into shorter sequences or joined into longer ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from transformers import BatchEncoding

import hocket
from hocket_nlp import ALiBi
from hocket_nlp.functional import scale_sequence_length


def batch_of(samples: int, length: int) -> dict[str, Any]:
    tokens = torch.arange(samples * length).reshape(samples, length)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens % 3 > 0).long(),
        "labels": tokens + 1,
        "scale": torch.tensor(2.0),
    }


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5))
def test_cutting_gives_the_pieces_in_order_and_joining_them_gives_the_batch(samples: int, part: int, cut: int) -> None:
    batch = batch_of(samples, part * cut)
    short = scale_sequence_length(batch, 1 / cut)
    for name in ("input_ids", "attention_mask", "labels"):
        want = [piece for row in batch[name] for piece in row.split(part)]
        assert torch.equal(short[name], torch.stack(want))
    assert short["scale"] is batch["scale"]
    back = scale_sequence_length(short, cut)
    assert all(torch.equal(back[name], batch[name]) for name in batch)


def test_the_shapes_of_composer() -> None:
    short = scale_sequence_length(batch_of(2, 8), 0.25)
    assert short["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]


@dataclass
class Tokens:
    ids: Tensor
    name: str


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_mappings_keep_their_kind_and_are_not_changed(kind: type) -> None:
    batch = kind(batch_of(2, 8) | {"inputs_embeds": torch.zeros(2, 8, 3)})
    short = scale_sequence_length(batch, 0.5)
    assert type(short) is kind and list(short) == list(batch)
    assert short["inputs_embeds"].shape == (4, 4, 3) and short["labels"].shape == (4, 4)
    assert batch["input_ids"].shape == (2, 8)


def test_other_batches_go_by_their_first_sequences() -> None:
    inputs, targets = scale_sequence_length((torch.zeros(4, 6), torch.ones(4, 6)), 2)
    assert inputs.shape == targets.shape == (2, 12)
    tokens = scale_sequence_length(Tokens(torch.zeros(4, 6), "a"), 1 / 3)
    assert tokens.ids.shape == (12, 2) and tokens.name == "a"


def test_a_scaling_of_one_returns_the_batch_itself() -> None:
    batch = batch_of(2, 8)
    assert scale_sequence_length(batch, 1.0) is batch


@pytest.mark.parametrize("scaling", [0, -1, 0.75, 1.5, 0.3, float("inf"), float("nan"), "0.25", True, None, [2]])
def test_scalings_across_sequences_are_refused(scaling: Any) -> None:
    with pytest.raises(ValueError, match="whole number"):
        scale_sequence_length(batch_of(12, 12), scaling)


@pytest.mark.parametrize(
    ("batch", "scaling", "error"),
    [
        (batch_of(2, 6), 0.25, "6 tokens cannot be split into 4 .* multiple of 4"),
        (batch_of(3, 8), 2, "3 sequences cannot be joined 2 by 2.*drop_last=True"),
        ({"input_ids": torch.zeros(2, 8), "labels": torch.zeros(2)}, 0.5, r"shape \(2,\) cannot follow .*\(2, 8\)"),
        ({"input_ids": torch.zeros(2, 8), "labels": torch.zeros(2, 4)}, 0.5, r"shape \(2, 4\) cannot follow"),
        ({"input_ids": torch.zeros(2, 8), "mask": torch.zeros(2, 1, 8, 8)}, 0.5, r"shape \(2, 1, 8, 8\) cannot follow"),
        ((torch.zeros(4), [1, 2]), 0.5, r"no tensor of shape \(B, L\)"),
    ],
)
def test_what_cannot_be_scaled_is_named(batch: Any, scaling: float, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        scale_sequence_length(batch, scaling)


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_training_batches_are_scaled_whatever_their_kind_and_evaluation_is_not(build, kind: type, tmp_path) -> None:
    """What collators of transformers return is no dict: Composer skips it and says nothing."""
    seen: list[tuple[bool, list[list[int]]]] = []
    model = build("gpt2").train()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((module.training, kwargs["input_ids"].tolist())), with_kwargs=True
    )
    tokens = torch.arange(48).reshape(3, 16)
    trainer = hocket.Trainer(
        model=model, train_data=[kind({"input_ids": tokens, "labels": tokens})], optimizer="sgd(lr=0.1)", device="cpu",
        eval_data=[kind({"input_ids": tokens, "labels": tokens})], duration="1ep", folder=tmp_path,
        algorithms=[ALiBi(max_sequence_length=64, train_sequence_length_scaling=0.25)],
    )  # fmt: skip
    seen.clear()  # the trial pass of the surgery
    trainer.fit()
    assert seen == [(True, torch.arange(48).reshape(12, 4).tolist()), (False, tokens.tolist())]
