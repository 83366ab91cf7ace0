"""Plug-ins that put other values into the model's tensors for an evaluation: alone, together, forgetful, and after errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import make_trainer, same, weights
from torch import Tensor, nn

import hocket
from hocket.plugins import ConflictError, PluginError


class Fills(hocket.Callback):
    """Evaluates and predicts with one value in every tensor whose name has the prefix."""

    def __init__(self, value: float, prefix: str = "") -> None:
        self.value, self.prefix = value, prefix

    def _tensors(self, state: hocket.State) -> list[Tensor]:
        return [tensor for name, tensor in state.model.named_parameters() if name.startswith(self.prefix)]

    def eval_before_all(self, state: hocket.State) -> None:
        state.borrow(self, [(tensor, torch.full_like(tensor, self.value)) for tensor in self._tensors(state)])

    def eval_after_all(self, state: hocket.State) -> None:
        state.give_back(self)

    predict_start = eval_before_all
    predict_end = eval_after_all


class Forgets(Fills):
    """Does not give back."""

    eval_after_all = predict_end = None  # type: ignore[assignment]


BATCHES = [
    (torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.tensor([0, 1, 1, 0])) for i in range(4)
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def trainer(*callbacks: hocket.Callback, **changes: Any) -> hocket.Trainer:
    arguments = {"model": network(), "train_data": BATCHES, "device": "cpu", "callbacks": callbacks}
    return make_trainer(**{**arguments, **changes})


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def by_hand(model: nn.Sequential, value: float, *parts: int) -> nn.Sequential:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for part in parts:
            for parameter in model[part].parameters():
                parameter.fill_(value)
    return model


def test_evaluation_and_prediction_see_the_values_and_training_does_not() -> None:
    run, plain = trainer(Fills(0.0), eval_data=BATCHES, eval_every="1ba"), trainer()
    addresses = [(id(p), p.data_ptr()) for p in run.state.model.parameters()]
    result = run.fit()
    plain.fit()
    assert result.metrics["eval/loss"] == pytest.approx(0.693147, abs=1e-6)  # ln 2: all logits are 0
    assert all(not output.any() for output in run.predict([x for x, _ in BATCHES]))
    assert same(weights(run), weights(plain))
    assert addresses == [(id(p), p.data_ptr()) for p in run.state.model.parameters()]


def test_two_that_borrow_different_tensors_compose() -> None:
    run = trainer(Fills(0.5, "0."), Fills(-1.0, "1."))
    before = weights(run)
    expected = by_hand(by_hand(run.state.model, 0.5, 0), -1.0, 1)
    for output, (x, _) in zip(run.predict([x for x, _ in BATCHES]), BATCHES, strict=True):
        torch.testing.assert_close(output, expected(x).detach())
    assert same(weights(run), before)


def test_two_that_borrow_the_same_tensors_are_refused_by_name() -> None:
    run = trainer(Fills(0.5), Fills(-1.0, "1."))
    before = weights(run)
    with pytest.raises(ConflictError, match=r"callback 'fills-2' cannot .* while callback 'fills' has its own there"):
        run.evaluate(BATCHES)
    assert same(weights(run), before)
    run.fit("1ba")  # and goes on


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_one_that_does_not_give_back_is_named_and_loses_its_values(method: str) -> None:
    run = trainer(Forgets(0.5))
    before = weights(run)
    with pytest.raises(
        PluginError, match=r"callback 'forgets' borrowed .* state\.give_back\(self\) on (eval_after_all|predict_end)"
    ):
        run.evaluate(BATCHES) if method == "evaluate" else run.predict([x for x, _ in BATCHES])
    assert same(weights(run), before)


def test_an_error_gives_back_for_those_who_do_not_listen_to_it() -> None:
    class Broken:
        def __iter__(self) -> Any:
            yield BATCHES[0]
            raise OSError("disk")

    run = trainer(Fills(0.5))
    before = weights(run)
    with pytest.raises(OSError, match="disk"):
        run.evaluate(Broken())
    assert same(weights(run), before)
