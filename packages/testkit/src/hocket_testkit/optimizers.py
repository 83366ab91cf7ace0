"""Tests for optimizers that are given by name."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hocket
from hocket import plugins
from hocket.basics import seeding
from hocket.basics.short_repr import short
from hocket.plugins.building import read
from hocket_testkit.compare import difference
from hocket_testkit.conformance import Planned, raiser, weights
from hocket_testkit.observing import Observation, observe
from hocket_testkit.reference import convolutional_network, labelled_images
from hocket_testkit.runs import Observed, _loss, _not_plain, _Takes


class OptimizerConformance(Observed):
    """Test learning, repetition, state, resuming, evaluations and groups. Inherit and set :attr:`optimizer`.

    Example:
        >>> from hocket_testkit import OptimizerConformance
        >>> class TestAdamW(OptimizerConformance):
        ...     optimizer = "adamw(lr=1e-2)"
    """

    #: What is passed as ``optimizer=``: a name with arguments, or a configuration.
    optimizer: ClassVar[Any]
    #: Further arguments of every Trainer of the suite.
    arguments: ClassVar[dict[str, Any]] = {}
    #: Inherited test -> why it does not apply. It is skipped with that reason.
    exempt: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _begin(self, request: pytest.FixtureRequest, tmp_path: Any) -> None:
        if request.function.__name__ in self.exempt:
            pytest.skip(self.exempt[request.function.__name__])
        self.folder = tmp_path

    def _observe(self) -> Observation:
        def start(plugin: Any, **changes: Any) -> hocket.Trainer:
            given = self.arguments.get("callbacks", ())
            trainer = self.trainer(**changes | {"callbacks": [*given, changes["callbacks"]]})
            changes["callbacks"].plugin = trainer.state.optimizers[0]
            return trainer

        name, _ = read("optimizers", self.optimizer)
        return observe(lambda: None, start, _model, plugins.get("optimizers", name))

    _numbers = itertools.count()

    def trainer(self, **changes: Any) -> hocket.Trainer:
        """Return a Trainer of the reference run; ``changes`` are arguments."""
        model, data = _model(), labelled_images()
        given: dict[str, Any] = {
            "model": model, "loss": nn.functional.cross_entropy, "optimizer": self.optimizer, "train_data": data,
            "eval_data": data, "duration": "2ep", "seed": 17, "device": "cpu", "strategy": "single", "folder": self.folder,
            "run_name": f"run-{next(self._numbers)}",
        }  # fmt: skip
        return hocket.Trainer(**{**given, **self.arguments, **changes})

    def test_learns(self) -> None:
        """The loss of the reference model on the training data falls."""
        trainer = self.trainer(duration="6ep")
        before = _loss(trainer.evaluate())
        trainer.fit()
        after = _loss(trainer.evaluate())
        assert after < before, f"{short(self.optimizer)}: the loss went from {before:.4g} to {after:.4g} in 6 epochs."

    def test_is_deterministic(self) -> None:
        """Two runs with one seed end with bitwise identical weights."""
        first, second = self.trainer(), self.trainer()
        first.fit()
        torch.rand(3)  # the process's random numbers must not matter
        second.fit()
        found = difference(weights(second), weights(first), at="weights")
        assert found is None, f"Two runs with one seed differ: {found}."

    def test_its_state_is_plain(self) -> None:
        """``state_dict`` holds tensors, numbers, strings, and lists and dicts of them, which load without code."""
        trainer = self.trainer()
        trainer.fit()
        state = trainer.state.optimizers[0].state_dict()
        states = {str(key): value for key, value in state["state"].items()}
        wrong = _not_plain({**state, "state": states}, "state_dict()")
        assert wrong is None, f"{wrong}. Keep what is needed in tensors, numbers, strings, and lists and dicts of them."

    def test_resumes_in_the_middle(self) -> None:
        """A run resumed within an epoch ends bitwise identical to the uninterrupted run, and evaluates the same weights."""
        taken = _Takes()
        whole = self.trainer(callbacks=[taken])
        taken.trainer = whole
        values = whole.fit().metrics
        assert taken.states
        for middle, state in taken.states.items():
            resumed = self.trainer()
            resumed.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
            again = resumed.fit().metrics
            found = difference(weights(resumed), weights(whole), at="weights")
            found = found or difference(again["eval/loss"], values["eval/loss"], at="eval/loss")
            assert found is None, (
                f"A run that was resumed after batch {middle} differs from the uninterrupted run: {found}. Return everything "
                "that later steps depend on from state_dict(): what is in `state` and in `param_groups`."
            )

    def test_copies_step_alike(self) -> None:
        """A deep copy and an unpickled copy of model and optimizer take the same next step."""
        trainer = self.trainer()
        trainer.fit("1ba")
        pair = trainer.state.model, trainer.state.optimizers[0]
        after = []
        for model, optimizer in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair)), pair):
            for each in model.parameters():
                each.grad = torch.ones_like(each)
            optimizer.step()
            after.append(model.state_dict())
        found = difference(after[0], after[2], at="weights") or difference(after[1], after[2], at="weights")
        assert found is None, (
            f"A copy of the optimizer steps differently: {found}. Rebuild other attributes in __setstate__."
        )

    def test_an_evaluation_leaves_the_weights_alone(self) -> None:
        """Training continues with unchanged weights, whether an evaluation succeeds or fails."""
        planned = raiser("eval_after_forward", after=0)
        trainer = self.trainer(callbacks=[planned])
        trainer.fit("1ep")
        before = weights(trainer)
        trainer.evaluate()
        assert difference(weights(trainer), before, at="weights") is None
        planned.after = planned.calls + 1
        with pytest.raises(Planned):
            trainer.evaluate()
        found = difference(weights(trainer), before, at="weights")
        assert found is None, f"An evaluation that failed changed the weights: {found}."

    def test_takes_groups(self) -> None:
        """Each group has its own learning rate: parameters whose rate is 0 keep their values."""
        name, config = read("optimizers", self.optimizer)
        groups = [{"match": "1d", "lr": 0.0}]
        trainer = self.trainer(optimizer={name: {**config, "groups": groups}})
        before = weights(trainer)
        trainer.fit()
        after = weights(trainer)
        moved = {key for key, value in after.items() if difference(value, before[key]) is not None}
        flat = {key for key, value in trainer.state.model.named_parameters() if value.ndim <= 1}
        assert moved and not moved & flat, f"With a learning rate of 0, {sorted(moved & flat)} moved. Use group['lr']."

    def test_skips_parameters_without_gradients(self) -> None:
        """Frozen parameters keep their values, also with weight decay."""
        trainer = self.trainer()
        name, frozen = next(iter(trainer.state.model.named_parameters()))
        frozen.requires_grad_(False)
        before = frozen.detach().clone()
        trainer.fit()
        assert torch.equal(frozen, before), (
            f"{name} has no gradient and was changed. Skip parameters whose .grad is None."
        )


def _model() -> nn.Module:
    with seeding.preserved():
        torch.manual_seed(0)
        return convolutional_network()
