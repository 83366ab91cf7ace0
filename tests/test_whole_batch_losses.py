"""Losses over pairs of a batch are never divided, and losses that a model keeps are exact in microbatches and over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

import hocket
from hocket.plugins import PlanError
from hocket_testkit import run_ranks

torch.manual_seed(0)
INPUTS, OTHERS = torch.randn(2, 8, 3)
START = torch.randn(2, 3)


def contrastive(one: Tensor, other: Tensor) -> Tensor:
    return nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))


def network() -> nn.Linear:
    layer = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(START)
    return layer


def by_hand() -> Tensor:
    weight = START.clone().requires_grad_()
    contrastive(INPUTS @ weight.T, OTHERS @ weight.T).backward()
    assert weight.grad is not None
    return START - weight.grad


class Contrastive(hocket.Task):
    loss_reduction = "batch"

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, batch: Any) -> Any:
        return self.network(batch[0]), self.network(batch[1])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return contrastive(*outputs)


class Gathered(Contrastive):
    """Every rank computes the loss of all ranks' outputs."""

    loss_reduction = "gathered"

    def loss(self, outputs: Any, batch: Any) -> Any:
        return contrastive(*(torch.cat(all_gather(each)) for each in outputs))


class Said(Contrastive):
    """As `Contrastive`, said by the loss itself."""

    loss_reduction = None

    def loss(self, outputs: Any, batch: Any) -> Any:
        return hocket.Loss(contrastive(*outputs), reduction="batch")


class OwnStep(Said):
    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.pairs, batch)

    def pairs(self, batch: Any) -> Any:
        return self.loss(self(batch), batch)


def train(model: nn.Module, **arguments: Any) -> Tensor:
    arguments = {"train_data": [(INPUTS, OTHERS)], "duration": "1ba", "device": "cpu"} | arguments
    hocket.Trainer(model=model, optimizer="sgd(lr=1.0)", **arguments).fit()
    return next(model.parameters()).detach()


def plain_loss(outputs: Tensor, others: Tensor) -> Tensor:
    return contrastive(outputs, others @ START.T)


class Declared(nn.Module):
    """A loss object that declares its reduction, as those of torch do."""

    reduction = "batch"

    def forward(self, outputs: Tensor, others: Tensor) -> Tensor:
        return plain_loss(outputs, others)


@pytest.mark.parametrize("task", [Contrastive, Said, OwnStep])
def test_the_whole_batch_is_computed_at_once(task: Any) -> None:
    torch.testing.assert_close(train(task()), by_hand(), rtol=1e-6, atol=1e-7)


DIVIDED = [{"microbatch": 4}, {"microbatch": "auto"}, {"accumulate": "2ba"}]
PLAN = {
    "a Task": lambda: {"model": Contrastive()},
    "gathered": lambda: {"model": Gathered()},
    "an argument": lambda: {"model": network(), "loss": plain_loss, "loss_reduction": "batch"},
    "a loss object": lambda: {"model": network(), "loss": Declared()},
}


@pytest.mark.parametrize("given", PLAN.values(), ids=PLAN)
@pytest.mark.parametrize("divided", DIVIDED, ids=str)
def test_dividing_it_is_refused_in_the_plan(given: Any, divided: dict[str, Any]) -> None:
    (name,) = divided
    with pytest.raises(PlanError, match=rf"whole batch.*{name}= divides it into microbatches\. Omit {name}="):
        hocket.Trainer(**given(), **divided, device="cpu")


def test_processes_that_are_to_be_started_are_refused_before() -> None:
    with pytest.raises(PlanError, match=r"2 ranks would each compute it on a slice.*all_gather.*'gathered'"):
        hocket.Trainer(model=Contrastive(), strategy="ddp", devices=2, device="cpu")


@pytest.mark.parametrize("task", [Said, OwnStep])
def test_what_only_the_loss_says_is_refused_in_the_first_batch(task: Any) -> None:
    with pytest.raises(
        PlanError, match=r"whole batch.*microbatch of 4 of 8 samples\. Omit microbatch= and accumulate="
    ):
        train(task(), microbatch=4)
    batches = [(INPUTS[:4], OTHERS[:4]), (INPUTS[4:], OTHERS[4:])]
    if task is Said:
        with pytest.raises(PlanError, match="microbatch of 4 of 8 samples"):
            train(task(), train_data=batches, accumulate="2ba")
    train(task(), microbatch=8)  # does not divide it


def test_an_undeclared_one_warns_of_the_declaration() -> None:
    class Undeclared(Contrastive):
        loss_reduction = None

    with pytest.warns(
        UserWarning, match="not the mean of their losses.*over pairs of the batch.*loss_reduction='batch'"
    ):
        train(Undeclared(), microbatch=4)


def test_unknown_reductions_are_refused() -> None:
    wrong = type("Wrong", (Contrastive,), {"loss_reduction": "pairs"})
    with pytest.raises(ValueError, match=r"loss_reduction='pairs' is neither 'mean' nor 'sum', 'batch'"):
        hocket.Trainer(model=wrong())
    with pytest.raises(ValueError, match=r"reduction='pairs' of a hocket.Loss is neither 'mean' nor"):
        hocket.basics.losses.as_loss(hocket.Loss(torch.ones(()), reduction="pairs"))  # type: ignore[arg-type]


class Sums(Said):
    """Several named losses with a total, which is a sum over samples."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        one, other = (each.square().sum() for each in outputs)
        return hocket.Loss(one + 2 * other, parts={"one": one.detach(), "other": other.detach()}, reduction="sum")


class Experts(hocket.Task):
    """The model keeps an auxiliary loss, a mean over samples, in an attribute, and returns it too."""

    def __init__(self, returned: bool = False) -> None:
        super().__init__()
        self.network, self.returned = network(), returned

    def forward(self, batch: Any) -> Any:
        outputs = self.network(batch[0])
        self.aux_loss = outputs.square().mean()
        return {"logits": outputs, "aux_loss": self.aux_loss} if self.returned else outputs

    def loss(self, outputs: Any, batch: Any) -> Any:
        aux = outputs["aux_loss"] if self.returned else self.aux_loss
        logits = outputs["logits"] if self.returned else outputs
        main = logits.abs().mean()
        return {"total": main + 0.5 * aux, "main": main, "aux": aux}


def sums_by_hand() -> Tensor:
    weight = START.clone().requires_grad_()
    ((INPUTS @ weight.T).square().sum() + 2 * (OTHERS @ weight.T).square().sum()).backward()
    return START - weight.grad


def experts_by_hand() -> Tensor:
    weight = START.clone().requires_grad_()
    outputs = INPUTS @ weight.T
    (outputs.abs().mean() + 0.5 * outputs.square().mean()).backward()
    return START - weight.grad


EXACT = {
    "sums": (Sums, sums_by_hand),
    "kept": (Experts, experts_by_hand),
    "returned": (lambda: Experts(returned=True), experts_by_hand),
}


@pytest.mark.parametrize("name", EXACT)
def test_sums_and_auxiliary_losses_are_exact_in_microbatches(name: str) -> None:
    make, expected = EXACT[name]
    for microbatch in (None, 3):
        torch.testing.assert_close(train(make(), microbatch=microbatch), expected(), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Every rank reads all of the list")
def test_over_two_ranks() -> None:
    """A loss that gathers is that of the global batch, one that does not is refused, the others are exact."""

    def rank_main(rank: int) -> Any:
        settings: dict[str, Any] = {"strategy": "ddp", "global_batch": 8}
        refused = []
        for task in (Contrastive, Said):
            with pytest.raises(PlanError, match="2 ranks would each compute it on a slice") as caught:
                train(task(), **settings)
            refused.append(str(caught.value))
        with pytest.raises(PlanError, match=r"microbatches\. Omit microbatch="):
            train(Gathered(), **settings, microbatch=2)
        return [train(make(), **settings) for make in (Gathered, *(make for make, _ in EXACT.values()))]

    expected = [by_hand(), *(function() for _, function in EXACT.values())]
    for trained in run_ranks(rank_main, 2, timeout=120):
        for one, other in zip(trained, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
