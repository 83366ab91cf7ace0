"""Training with pseudo-labels from two loaders, against a loop by hand."""

from __future__ import annotations

from typing import Any

import torch
from loops.harness import Draw, Loop, difference
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from hocket_testkit.ranks import run_ranks


class TestTwoLoaders(Loop):
    example = "two_loaders"
    batches = 30
    microbatch = 3  # labelled digits, and twelve without labels

    def trained(self, loop: Any, **changes: Any) -> dict[str, Tensor]:
        return super().trained(loop, **{"optimizer": "adam(lr=0.01)", **changes})  # which is soon sure of predictions

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        task, guessed = example.PseudoLabels(), 0
        adam = Adam(task.parameters(), lr=0.01)
        for batch in batches:
            (inputs, labels), (unlabelled,) = batch["labelled"], batch["unlabelled"]
            loss = cross_entropy(task.network(inputs), labels)
            outputs = task.network(unlabelled)
            with torch.no_grad():
                chances = outputs.softmax(1)
                sure, guesses = (chances.amax(1) > 0.9).float(), chances.argmax(1)
            guessed += int(sure.sum())
            loss = loss + (sure * cross_entropy(outputs, guesses, reduction="none")).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        assert guessed > 50
        return dict(task.state_dict())

    def test_ranks_share_the_batches_of_both_loaders(self, loop: Any) -> None:
        def rank(number: int) -> dict[str, Tensor]:
            return self.trained(loop, strategy="ddp", global_batch=10)

        first, second = run_ranks(rank, 2)
        assert difference(first, second) == 0
        assert difference(first, self.trained(loop)) <= self.rounding

    def test_an_epoch_is_that_of_the_longer_loader(self, loop: Any) -> None:
        batches = list(loop.data())
        assert len(batches) == (1400 - 30) // 40
        assert [len(batches[-1][name][0]) for name in ("labelled", "unlabelled")] == [10, 40]
