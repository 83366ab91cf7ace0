"""Faster R-CNN against a loop by hand, whose losses are those of a rank's images or of a microbatch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops.harness import SEED, Draw, Loop, difference
from torch import Tensor
from torch.optim import AdamW

pytest.importorskip("torchvision")


def images(batch: Any, rows: slice) -> Any:
    """Return some of a batch's images, with their targets."""
    return tuple(each[rows] for each in batch)


class TestDetection(Loop):
    example = "detection"
    batches = 4
    microbatch = None  # the losses are means over the boxes that a microbatch's proposals yield: see the test below

    def trained(self, loop: Any, **changes: Any) -> dict[str, Tensor]:
        return super().trained(loop, **{"metrics": None, **changes})

    @staticmethod
    def slice(batch: Any, rank: int, ranks: int) -> Any:
        each = len(batch[0]) // ranks
        return images(batch, slice(rank * each, (rank + 1) * each))

    @classmethod
    def by_hand(cls, example: Any, batches: list[Any], draw: Draw, parts: int = 1) -> dict[str, Tensor]:
        task = example.Detector().train()
        adam = AdamW(task.parameters(), lr=3e-3)
        for batch in batches:
            adam.zero_grad()
            for rank, generator in enumerate(draw.generators):
                torch.set_rng_state(generator.get_state())  # torchvision draws boxes from the global random numbers
                for part in range(parts):
                    mine = cls.slice(cls.slice(batch, rank, draw.ranks), part, parts)
                    losses = list(task.network(*mine).values())
                    loss = losses[0] + losses[1] + losses[2] + losses[3]
                    (loss / (draw.ranks * parts)).backward()
                generator.set_state(torch.get_rng_state())
            adam.step()
        return dict(task.state_dict())

    def test_microbatches_train_on_the_mean_of_their_losses(self, loop: Any) -> None:
        batches = self.first_batches(loop)
        torch.manual_seed(SEED)
        expected = self.by_hand(loop, batches, Draw(1), parts=2)
        found = difference(self.trained(loop, train_data=batches, microbatch=4), expected)
        assert found <= self.rounding, f"weights differ by {found}"

    def test_evaluation_compares_boxes(self, loop: Any) -> None:
        (batch,) = loop.data(images=8)
        true = batch[1]
        found = [{**each, "scores": torch.tensor([0.9, 0.4])} for each in true]  # the second is not sure
        recall = loop.Recall()
        recall.reset()
        recall.update(found, true)
        assert recall.compute() == 0.5
        with loop.make_trainer(device="cpu") as trainer:
            assert set(trainer.evaluate({"unseen": [batch]})) == {"unseen/recall"}
            assert [set(each) for each in trainer.predict([batch])[0]] == [{"boxes", "labels", "scores"}] * 8
