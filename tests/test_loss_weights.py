"""Losses with ignored labels, class weights and smoothing, however spelt and divided, have the gradient of the full batch."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.testkit import run_ranks

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

    def of(outputs: Tensor, targets: Tensor, **more: Any) -> Tensor:
        return function(outputs, targets, **settings, **more)

    def all_samples(outputs: Tensor, targets: Tensor) -> Tensor:
        return of(outputs, targets) + 0.1 * F.mse_loss(outputs, torch.ones_like(outputs))

    def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
        counts = (targets != settings.get("ignore_index", -100)).to(outputs)
        return (of(outputs, targets, reduction="none") * counts).sum() / counts.sum().clamp(min=1)

    def selected(outputs: Tensor, targets: Tensor) -> Tensor:
        return of(outputs, targets, reduction="none")[targets != settings.get("ignore_index", -100)].mean()

    return {
        "name": kind,
        "function": function,
        "partial": functools.partial(function, **settings),
        "module": module(**settings),
        "sum": module(**settings, reduction="sum"),
        "lambda": lambda outputs, targets: of(outputs, targets),
        "half": lambda outputs, targets: 0.5 * of(outputs, targets),
        "constant": lambda outputs, targets: {"loss": of(outputs, targets) + 3.0},
        "twice": lambda outputs, targets: of(outputs, targets) + of(outputs, targets),
        "all samples": all_samples,
        "all positions": lambda outputs, targets: of(outputs, targets, reduction="none").mean(),
        "by hand": by_hand,
        "selected": selected,
    }[spelling]


#: The spellings of every loss; and those of losses without class weights or probabilities.
SPELLINGS = [
    "name", "function", "partial", "module", "sum", "lambda", "half", "constant", "twice", "all samples", "all positions",
]  # fmt: skip
BY_HAND = ["by hand", "selected"]


def drawn(seed: int) -> dict[str, Any]:
    """Draw a loss, labels and how to divide them."""
    draw = random.Random(f"case {seed}")  # small integers would give similar first draws
    kind, spelling = draw.choice(["cross_entropy", "nll_loss"]), draw.choice(SPELLINGS + BY_HAND)
    probabilities = kind == "cross_entropy" and spelling not in BY_HAND and draw.random() < 0.2
    settings: dict[str, Any] = {}
    if spelling not in ("name", "function"):
        if draw.random() < 0.5 and spelling not in BY_HAND:
            settings["weight"] = torch.tensor([1.0, 2.5, 0.5], dtype=torch.float64)
        if not probabilities:
            settings["ignore_index"] = draw.choice([-100, 255, 1])
        if kind == "cross_entropy" and draw.random() < 0.5:
            settings["label_smoothing"] = 0.1
    positions, ignored = draw.choice([0, 3]), settings.get("ignore_index", -100)
    sizes = draw.choice([(8, 8, 3), (6, 6, 6, 2), (5, 5)])
    generator = torch.Generator().manual_seed(seed)
    share, spared = draw.choice([0.0, 0.3, 0.8]), draw.random() < 0.5
    batches = []
    for number, size in enumerate(sizes):
        shape = (size, positions) if positions else (size,)
        targets = torch.randint(0, CLASSES, shape, generator=generator)
        ignore = torch.rand(shape, generator=generator) < share
        if share and size > 3:
            ignore[(where := 3 * draw.randint(0, 1)) : where + 2] = True
        if spared and not number:  # the first batch does not show that labels may be ignored
            targets[targets == ignored], ignore = 2, torch.zeros_like(ignore)
        targets[ignore] = ignored
        targets[-1] = 2  # a batch without any label that counts has no loss, in PyTorch either
        if probabilities:
            targets = torch.rand((size, CLASSES, *shape[1:]), generator=generator, dtype=torch.float64).softmax(1)
        batches.append((torch.randn(size, 4, generator=generator, dtype=torch.float64), targets))
    return {
        "kind": kind,
        "spelling": spelling,
        "settings": settings,
        "positions": positions,
        "batches": batches,
        "task": draw.choice([None, Tasked, Stepped]) if spelling not in ("name", "sum") else None,
        "microbatch": draw.choice([1, 2, 3, None]),
        "accumulate": draw.choice([None, 2]),
    }


def compare(case: dict[str, Any], rank: int = 0, ranks: int = 1) -> str:
    """Train with hocket and with plain PyTorch; the weights and the loss of the whole set in evaluation are equal.

    Returns the documented refusal of a loss that has no weight, or nothing.
    """
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
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5 if case["spelling"] != "sum" else 0.05)
    for inputs, targets in windows:
        optimizer.zero_grad()
        value(plain(inputs), targets).backward()
        optimizer.step()
    trained = model if case["task"] is None else case["task"](model, loss)
    given = [each for inputs, targets in batches if len((each := (inputs[rank::ranks], targets[rank::ranks]))[0])]
    trainer = hocket.Trainer(
        trained,
        given,
        loss=loss if case["task"] is None else None,
        optimizer=f"sgd(lr={optimizer.param_groups[0]['lr']})",
        device="cpu",
        duration="1ep",
        seed=1,
        microbatch=case["microbatch"],
        accumulate=case["accumulate"] and f"{window}ba",
        eval_data=given,
        **({"strategy": {"ddp": {"split_data": False}}} if ranks > 1 else {}),
    )
    try:
        trainer.fit()
    except ValueError as error:
        if "adds up means over different numbers" not in str(error):
            raise
        assert case["spelling"] == "all samples"
        return str(error)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    if ranks == 1 and case["task"] is not Stepped:
        everything = tuple(map(torch.cat, zip(*batches, strict=True)))
        with torch.no_grad():
            expected = value(plain(everything[0]), everything[1]).item()
        if case["spelling"] == "sum":
            expected /= len(everything[0])
        if case["spelling"] != "all samples":  # in evaluation, such a loss is a mean over batches, with a warning
            assert trainer.evaluate()["eval/loss"] == pytest.approx(expected, abs=1e-9)
    return ""


def test_a_divided_batch_has_the_gradient_of_the_full_batch() -> None:
    refused = [each for seed in range(40) if (each := compare(drawn(seed)))]
    assert len(refused) <= 4


@pytest.mark.long
def test_many_divided_batches_have_the_gradient_of_the_full_batch() -> None:
    refused = [each for seed in range(100, 500) if (each := compare(drawn(seed)))]
    assert len(refused) <= 40


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_batches_divided_over_ranks_have_the_gradient_of_the_full_batch(ranks: int) -> None:
    # A loss that is refused for the labels of one rank ends the process group.
    cases = [case for seed in range(1000, 1080) if (case := drawn(seed))["spelling"] != "all samples"]

    def rank_main(rank: int) -> int:
        return sum(not compare(case, rank, ranks) for case in cases)

    assert run_ranks(rank_main, ranks) == [len(cases)] * ranks
