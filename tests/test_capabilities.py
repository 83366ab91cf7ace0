"""Small capabilities of the Trainer, each against the same thing in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import make_data, make_model, make_trainer, same, sgd, weights
from torch import Tensor, nn

import hocket

# --- where things are in a model's output


class Wrapped(nn.Module):
    """A model whose output holds more than the loss needs."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.wrap = make_model(), wrap

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        return self.wrap(self.net(inputs)) if targets is None else self.wrap(self.net(inputs), targets)


class Accuracy:
    """The fraction of correct predictions, from logits."""

    def reset(self) -> None:
        self.right, self.seen = 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.seen += len(targets)

    def compute(self) -> float:
        return self.right / self.seen


def plain(epochs: int = 2) -> nn.Module:
    model = make_model()
    optimizer, data = sgd(model.parameters()), make_data()
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(
    ("wrap", "outputs"),
    [
        (lambda logits: {"features": logits + 1, "logits": logits}, "logits"),
        (lambda logits: (logits + 1, logits), 1),
        (lambda logits: SimpleNamespace(logits=logits), "logits"),
        (lambda logits: [logits / 2], lambda output: output[0] * 2),
    ],
    ids=["name", "index", "attribute", "function"],
)
def test_outputs_says_what_loss_metrics_and_predictions_get(wrap: Any, outputs: Any) -> None:
    trainer = make_trainer(
        model=Wrapped(wrap), outputs=outputs, eval_data=make_data(shuffle=False), metrics={"accuracy": Accuracy()}
    )
    result = trainer.fit()
    expected = plain()
    assert same(weights(trainer), weights(expected))
    inputs, targets = make_data().dataset.tensors
    with torch.no_grad():
        logits = expected(inputs)
    assert result.metrics["eval/accuracy"] == pytest.approx((logits.argmax(1) == targets).float().mean().item())
    assert result.metrics["eval/loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), abs=1e-6)
    assert torch.allclose(torch.cat(trainer.predict(make_data(shuffle=False))), logits, atol=1e-6)


def test_outputs_of_a_model_with_its_own_loss_are_those_of_metrics() -> None:
    class Own(Wrapped):
        def forward(self, inputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:  # type: ignore[override]
            logits = self.net(inputs)
            return {"loss": F.cross_entropy(logits, labels), "scores": logits}

    data = [{"inputs": inputs, "labels": targets} for inputs, targets in make_data(shuffle=False)]
    trainer = make_trainer(
        model=Own(lambda logits: logits),
        loss=None,
        train_data=data,
        outputs="scores",
        train_metrics={"accuracy": Accuracy()},
    )
    assert 0 < trainer.fit().metrics["train/accuracy"] <= 1


def test_outputs_that_are_not_there_are_an_error_that_lists_what_is() -> None:
    with pytest.raises(KeyError, match=r"The model's output, a dict, has nothing at 'logit'; it has \['logits'\]"):
        make_trainer(model=Wrapped(lambda logits: {"logits": logits}), outputs="logit").fit()
    with pytest.raises(TypeError, match=r"Omit inputs=, targets= and outputs="):
        make_trainer(model=hocket.Task(), loss=None, outputs="logits")
