"""Losses with ignored labels, class weights and smoothing, however spelt and divided, have the gradient of the full batch."""

from __future__ import annotations

import copy
import functools
import random
import warnings
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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The loss adds up", module="hocket")  # of evaluation
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
    refused = [each for seed in range(140, 180) if (each := compare(drawn(seed)))]
    assert len(refused) <= 4


@pytest.mark.long
def test_many_divided_batches_have_the_gradient_of_the_full_batch() -> None:
    refused = [each for seed in range(200, 600) if (each := compare(drawn(seed)))]
    assert len(refused) <= 40


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_batches_divided_over_ranks_have_the_gradient_of_the_full_batch(ranks: int) -> None:
    # A loss that is refused for the labels of one rank ends the process group.
    cases = [case for seed in range(1000, 1045) if (case := drawn(seed))["spelling"] != "all samples"]

    def rank_main(rank: int) -> int:
        return sum(not compare(case, rank, ranks) for case in cases)

    assert run_ranks(rank_main, ranks) == [len(cases)] * ranks


@pytest.mark.parametrize(
    "loss",
    [
        lambda each, mask: (each * mask).sum() / mask.sum(),
        lambda each, mask: torch.sum(each * mask) / torch.sum(mask).clamp(min=1),
        lambda each, mask: torch.div((each * mask).sum(), torch.clamp_min(mask.sum(), 1)),
        lambda each, mask: (each * mask / mask.sum()).sum(),
        lambda each, mask: 2.0 * (each * mask).sum() / mask.sum().detach().double() + 1.0,
        lambda each, mask: (each * mask).sum() / torch.count_nonzero(mask),
        lambda each, mask: (each * mask).sum() / torch.maximum(mask.sum(), torch.ones((), dtype=torch.float64)),
        lambda each, mask: each[mask.bool()].mean(),
        lambda each, mask: torch.masked_select(each, mask.bool()).mean(),
        lambda each, mask: F.l1_loss(each[mask.bool()], torch.zeros_like(each[mask.bool()])),
        lambda each, mask: each[mask.nonzero(as_tuple=True)].mean(),
        lambda each, mask: each.flatten().index_select(0, mask.flatten().nonzero().squeeze(1)).square().mean(),
        lambda each, mask: each[mask.bool()].sum() / mask.sum(),
    ],
)
def test_a_mean_written_by_hand_is_weighed_by_what_it_is_over_though_the_first_batch_is_complete(loss: Any) -> None:
    torch.manual_seed(0)
    inputs, masks = torch.randn(4, 6, 4, dtype=torch.float64), torch.ones(4, 6, 3, dtype=torch.float64)
    masks[1:] = (torch.rand(3, 6, 3) < torch.tensor([0.9, 0.2, 0.0, 0.5, 0.1, 0.8])[:, None]).double()
    masks[1, 0, 0] = masks[2, 0, 0] = masks[3, 0, 0] = 1
    model = nn.Linear(4, 3).double()
    plain = copy.deepcopy(model)
    computed = lambda outputs, mask: loss(outputs.square(), mask)  # noqa: E731
    for batch in zip(inputs, masks, strict=True):
        gradients = torch.autograd.grad(computed(plain(batch[0]), batch[1]), list(plain.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    hocket.Trainer(
        model, list(zip(inputs, masks, strict=True)), loss=computed, optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        microbatch=2,
    ).fit()  # fmt: skip
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "loss",
    [
        lambda each, mask: (each * (mask / mask.sum())).sum(),
        lambda each, mask: (each * mask).mean() * (1 / mask.mean()),
        lambda each, mask: (each * mask).sum() * mask.sum().reciprocal(),
        lambda each, mask: torch.dot(each.flatten(), mask.flatten()) / mask.sum().item(),
        lambda each, mask: (each * mask).mean() / mask.mean(),
        lambda each, mask: (each * mask).sum() / mask.sum() + each.mean(),
    ],
)
def test_a_mean_whose_divisor_is_not_seen_is_tried_again(loss: Any) -> None:
    inputs, masks = torch.randn(4, 6, 4), torch.ones(4, 6, 3)
    masks[1:, ::2, 1:] = 0
    with pytest.warns(UserWarning, match="The loss of several samples is not the mean of their losses"):
        hocket.Trainer(
            nn.Linear(4, 3), list(zip(inputs, masks, strict=True)), loss=lambda outputs, mask: loss(outputs.square(), mask),
            optimizer="sgd(lr=0.1)", duration="1ep", device="cpu", microbatch=3,
        ).fit()  # fmt: skip


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: F.mse_loss(outputs, targets) / targets.new_tensor([1.0, 3.0]).sum(),
        lambda outputs, targets: (outputs - targets).square().mean() / torch.ones(3).sum() + 1.0,
    ],
)
def test_a_mean_that_is_divided_by_a_constant_sum_is_one_over_samples(loss: Any) -> None:
    model, inputs, targets = nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 3)
    expected = model.weight.detach() - torch.autograd.grad(loss(model(inputs), targets), model.weight)[0]
    hocket.Trainer(
        model, [(inputs, targets)], loss=loss, optimizer="sgd(lr=1.0)", duration="1ba", device="cpu", microbatch=3
    ).fit()
    torch.testing.assert_close(model.weight, expected)


def test_ranks_with_different_kinds_of_losses_are_refused() -> None:
    def rank_main(rank: int) -> str:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            if rank and step.pop():
                return (outputs.logsumexp(1) - outputs[:, 0]).mean()
            return F.cross_entropy(outputs, targets)

        step = [True, False]  # the second batch
        labels = torch.tensor([0, -100, 1, -100])
        trainer = hocket.Trainer(
            nn.Linear(4, 3), [(torch.randn(4, 4), labels)] * 2, loss=loss, optimizer="sgd(lr=0.1)", duration="1ep",
            device="cpu", strategy={"ddp": {"split_data": False}},
        )  # fmt: skip
        with pytest.raises(ValueError, match="mean over samples for some microbatches or ranks") as raised:
            trainer.fit()
        return f"{raised.value}, {trainer.state.timestamp.batch}"

    first, second = run_ranks(rank_main, 2)
    assert first == second and first.endswith(", 1")


def test_microbatches_with_different_kinds_of_losses_are_refused() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) if (targets < 0).any() else outputs.logsumexp(1).mean()

    with pytest.raises(ValueError, match="mean over samples for some microbatches or ranks"):
        hocket.Trainer(
            nn.Linear(4, 3), [(torch.randn(4, 4), torch.tensor([0, -100, 1, 2]))], loss=loss, optimizer="sgd(lr=0.1)",
            duration="1ep", device="cpu", microbatch=2,
        ).fit()  # fmt: skip


@pytest.mark.parametrize("microbatch", [8, 11, 16])
def test_a_penalty_of_weights_is_no_mean_over_samples(microbatch: int) -> None:
    """Also where the weight has a multiple of the microbatch's rows."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (32,), generator=generator)
    labels[::3] = -100

    def trained(**more: Any) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 64), nn.Linear(64, 4)).double()
        hidden = model[0].weight

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs, targets) + 0.1 * hidden.pow(2).mean()

        hocket.Trainer(model, [(inputs, labels)], loss=loss, optimizer="sgd(lr=0.5)", duration="1ep", **more).fit()
        return hidden.detach()

    torch.testing.assert_close(trained(microbatch=microbatch), trained(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "mean", [lambda v: v.mean(0), lambda v: v.mean(dim=(0,)), torch.nanmean, lambda v: v.sum() / len(v)]
)
def test_other_means_are_refused_in_every_spelling(mean: Any) -> None:
    inputs, labels = torch.randn(12, 5), torch.randint(4, (12,))
    labels[::3] = -100

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) + mean(outputs.pow(2).sum(1))

    trainer = hocket.Trainer(
        nn.Linear(5, 4), [(inputs, labels)], loss=loss, optimizer="sgd", duration="1ep", microbatch=4
    )
    with pytest.raises(ValueError, match="adds up means over different numbers"):
        trainer.fit()
