"""Streams of Hugging Face go on by their own state, and what that state is without is said."""

from __future__ import annotations

import warnings

import pytest
import torch

import hocket

datasets = pytest.importorskip("datasets")


def numbers(tmp_path, shuffled, duration):
    data = datasets.Dataset.from_dict({"x": [[float(n)] for n in range(64)]}).to_iterable_dataset(num_shards=4)
    data = data.shuffle(seed=1, buffer_size=16) if shuffled else data
    seen = Seen()
    loader = torch.utils.data.DataLoader(data.with_format("torch"), batch_size=4)
    trainer = hocket.Trainer(
        torch.nn.Linear(1, 1), loader, loss=seen.loss, inputs="x", optimizer="sgd(lr=0.0)", duration=duration,
        checkpoints=tmp_path, resume=True,
    )  # fmt: skip
    trainer.fit()
    return seen.numbers


class Seen:
    def __init__(self):
        self.numbers = []

    def loss(self, outputs, batch):
        self.numbers += batch["x"].flatten().tolist()
        return outputs.sum()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_without_a_shuffle_buffer_a_resumed_run_sees_every_sample_once_and_nothing_is_said(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The state of this data set")
        both = numbers(tmp_path, False, "7ba") + numbers(tmp_path, False, "16ba")
    assert sorted(both) == list(range(64))


def test_a_shuffle_buffer_is_said_to_be_missing_from_the_state(tmp_path):
    with pytest.warns(UserWarning, match="without its shuffle buffer: a run that is resumed within an epoch misses"):
        both = numbers(tmp_path, True, "7ba") + numbers(tmp_path, True, "16ba")
    assert len(both) == 64 > len(set(both))
