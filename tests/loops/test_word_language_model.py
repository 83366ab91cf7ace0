"""The recurrent language model against a loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops.harness import Draw, Loop, difference
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from hocket_testkit.ranks import run_ranks


class TestWordLanguageModel(Loop):
    example = "word_language_model"
    microbatch = 6
    rounding = 1e-4  # 2 % of a step: Adam divides a gradient by its size, so that a rounded one near 0 changes its step

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        model = example.LanguageModel()
        adam = Adam(model.parameters(), lr=5e-3)
        state = None
        for text in batches:
            outputs, (hidden, cell) = model.lstm(model.embedding(text[:, :-1]), state)
            state = (hidden.detach(), cell.detach())
            adam.zero_grad()
            scores = model.decoder(outputs)
            cross_entropy(scores.reshape(-1, scores.size(-1)), text[:, 1:].reshape(-1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            adam.step()
        return model.state_dict()

    # The list is read by every rank, which warns.
    @pytest.mark.filterwarnings("ignore:Every rank reads all")
    def test_it_trains_alike_on_two_ranks(self, loop: Any) -> None:
        """`global_batch` gives each rank its rows of every batch, and so of the text."""
        weights = run_ranks(lambda rank: self.trained(loop, strategy="ddp"), 2)[0]
        found = difference(weights, self.expected(loop))
        assert found <= self.rounding, f"weights differ by {found}"

    def test_an_epoch_begins_without_a_state(self, loop: Any) -> None:
        given: list[Any] = []

        class Watched(loop.LanguageModel):  # type: ignore[name-defined, misc]
            def text_loss(self, text: Tensor, state: Any) -> Any:
                given.append(state)
                return super().text_loss(text, state)

        self.trained(loop, model=Watched(), limit_train=2, duration="2ep")
        assert [state is None for state in given] == [True, False, True, False]
