"""Losses with ignored labels, class weights and smoothing, however spelt and divided, have the gradient of the full batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import hocket

CLASSES = 3


class Model(nn.Module):
    """Log-probabilities of classes, for each sample or for each of its positions."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES * max(positions, 1))
        self.shape = (CLASSES, positions) if positions else (CLASSES,)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).unflatten(1, self.shape).log_softmax(1)


class Tasked(hocket.Task):
    """Computes the loss itself."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.function = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.model(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.function(outputs, batch[1])


class Stepped(Tasked):
    """Takes its own steps."""

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.loss_of, batch)


def spell(kind: str, spelling: str, settings: dict[str, Any]) -> Any:
    """Return the loss as a user may write it."""
    function, module = {
        "cross_entropy": (F.cross_entropy, nn.CrossEntropyLoss),
        "nll_loss": (F.nll_loss, nn.NLLLoss),
    }[kind]
    return {
        "name": kind,
        "function": function,
        "partial": functools.partial(function, **settings),
        "module": module(**settings),
        "lambda": lambda outputs, targets: function(outputs, targets, **settings),
        "half": lambda outputs, targets: 0.5 * function(outputs, targets, **settings),
        "constant": lambda outputs, targets: {"loss": function(outputs, targets, **settings) + 3.0},
        "twice": lambda outputs, targets: (
            function(outputs, targets, **settings) + function(outputs, targets, **settings)
        ),
    }[spelling]


SPELLINGS = ["name", "function", "partial", "module", "lambda", "half", "constant", "twice"]


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Draw a loss, labels and how to divide them."""
    kind, spelling = draw(st.sampled_from(["cross_entropy", "nll_loss"])), draw(st.sampled_from(SPELLINGS))
    settings: dict[str, Any] = {}
    microbatch = draw(st.sampled_from([1, 2, 3, None]))
    if spelling not in ("name", "function"):
        if draw(st.booleans()):
            settings["weight"] = torch.tensor([1.0, 2.5, 0.5], dtype=torch.float64)
        settings["ignore_index"] = draw(st.sampled_from([-100, 255, 1]))
        if kind == "cross_entropy" and draw(st.booleans()):
            settings["label_smoothing"] = 0.1
    positions, ignored = draw(st.sampled_from([0, 3])), settings.get("ignore_index", -100)
    sizes = draw(st.sampled_from([(8, 8, 3), (6, 6, 6, 2), (5, 5)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    share = draw(st.sampled_from([0.0, 0.3, 0.8]))
    batches = []
    for size in sizes:
        shape = (size, positions) if positions else (size,)
        targets = torch.randint(0, CLASSES, shape, generator=generator)
        targets[torch.rand(shape, generator=generator) < share] = ignored
        if share and size > 3:
            targets[(where := 3 * draw(st.booleans())) : where + 2] = ignored
        targets[-1] = 2  # a batch without any label that counts has no loss, in PyTorch either
        batches.append((torch.randn(size, 4, generator=generator, dtype=torch.float64), targets))
    return {
        "kind": kind,
        "spelling": spelling,
        "settings": settings,
        "positions": positions,
        "batches": batches,
        "task": draw(st.sampled_from([None, Tasked, Stepped])) if spelling != "name" else None,
        "microbatch": microbatch,
        "accumulate": draw(st.sampled_from([None, 2])),
    }


def compare(case: dict[str, Any], **how: Any) -> None:
    """Train with hocket and with plain PyTorch; the weights and the loss of the whole set in evaluation are equal."""
    torch.manual_seed(0)
    model = Model(case["positions"]).double()
    plain = copy.deepcopy(model)
    loss = spell(case["kind"], case["spelling"], case["settings"])
    computed: Any = getattr(F, loss) if isinstance(loss, str) else loss
    value = lambda outputs, targets: sum(v.values()) if isinstance(v := computed(outputs, targets), dict) else v  # noqa: E731
    batches, window = case["batches"], case["accumulate"] or 1
    windows = [
        tuple(map(torch.cat, zip(*batches[at : at + window], strict=True))) for at in range(0, len(batches), window)
    ]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for inputs, targets in windows:
        optimizer.zero_grad()
        value(plain(inputs), targets).backward()
        optimizer.step()
    trained = model if case["task"] is None else case["task"](model, loss)
    trainer = hocket.Trainer(
        trained,
        batches,
        loss=loss if case["task"] is None else None,
        optimizer="sgd(lr=0.5)",
        device="cpu",
        duration="1ep",
        seed=1,
        microbatch=case["microbatch"],
        accumulate=case["accumulate"] and f"{window}ba",
        eval_data=batches,
        **how,
    )
    trainer.fit()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    if case["task"] is not Stepped:
        everything = tuple(map(torch.cat, zip(*batches, strict=True)))
        with torch.no_grad():
            expected = value(plain(everything[0]), everything[1]).item()
        assert trainer.evaluate()["eval/loss"] == pytest.approx(expected, abs=1e-9)


SOME = hypothesis.settings(
    max_examples=15,
    phases=[hypothesis.Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@SOME
@hypothesis.given(cases())
def test_a_divided_batch_has_the_gradient_of_the_full_batch(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.long
@hypothesis.settings(SOME, max_examples=400)
@hypothesis.given(cases())
def test_many_divided_batches_have_the_gradient_of_the_full_batch(case: dict[str, Any]) -> None:
    compare(case)
