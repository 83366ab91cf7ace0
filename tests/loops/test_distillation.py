"""Distillation against a loop by hand; and what becomes of the teacher."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loops.harness import Draw, Loop, load
from torch import Tensor
from torch.optim import Adam

import hocket


class TestDistillation(Loop):
    example = "distillation"

    @pytest.fixture
    def loop(self) -> Any:
        """Return the example with a teacher that is trained once: two ranks would train it on batches twice as large."""
        module: Any = load(self.example)
        teacher = module.distillation().teacher
        module.distillation = lambda: module.Distillation(module.small(), copy.deepcopy(teacher))
        return module

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        both = example.distillation()
        student, teacher = both.student.train(), both.teacher.eval()
        adam = Adam(student.parameters(), lr=3e-3)
        for images, labels in batches:
            with torch.no_grad():
                taught = (teacher(images) / 4).softmax(1)
            outputs = student(images)
            soft = torch.nn.functional.cross_entropy(outputs / 4, taught)
            loss = soft * 16 + torch.nn.functional.cross_entropy(outputs, labels)
            adam.zero_grad()
            loss.backward()
            adam.step()
        return dict(both.state_dict())

    @pytest.mark.filterwarnings("ignore:Training is over")
    def test_the_teacher_is_frozen_in_evaluation_mode_and_in_checkpoints(self, loop: Any, tmp_path: Path) -> None:
        class Look(hocket.Callback):
            def batch_end(self, state: hocket.State) -> None:
                model: Any = state.model
                student, teacher = model.student, model.teacher
                assert student.training and not any(part.training for part in teacher.modules())
                (optimizer,) = state.optimizers
                held = {id(each) for group in optimizer.param_groups for each in group["params"]}
                assert held == {id(each) for each in student.parameters()}

        def make(**changes: Any) -> hocket.Trainer:
            store = hocket.Checkpoints(tmp_path, every="1ba")
            trainer: hocket.Trainer = loop.make_trainer(duration="2ba", device="cpu", checkpoints=store, **changes)
            return trainer

        both = loop.distillation()
        before = {name: weight.clone() for name, weight in both.teacher.state_dict().items()}
        with make(model=both, callbacks=[Look()]) as trainer:
            trainer.fit()
        after = both.teacher.state_dict()
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        blank = copy.deepcopy(both)
        for weight in blank.parameters():
            weight.data.zero_()
        with make(model=blank, resume="auto") as trainer:
            trainer.fit()
        assert all(torch.equal(blank.teacher.state_dict()[name], weight) for name, weight in before.items())
