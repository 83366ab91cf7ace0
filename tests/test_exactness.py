"""A run is the loop that one would write by hand: the same bits in one piece, the same gradient however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import momentum as sgd, weights
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.data import batches


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def by_hand(
    model: nn.Module, batches: Any, optimizer: torch.optim.Optimizer, epochs: int, losses: list[float] | None = None
) -> None:
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if losses is not None:
                losses.append(loss.item())


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("evaluated", [False, True])
def test_nothing_attached_gives_the_bits_of_a_hand_written_loop(data, model, optimizer, evaluated) -> None:
    """Shuffled, with dropout and a last batch that is smaller; evaluation in between changes nothing."""
    ours, theirs = model(dropout=0.3), model(dropout=0.3)
    torch.manual_seed(3)
    losses: list[float] = []
    by_hand(theirs, data(), optimizer(theirs.parameters()), 3, losses)

    logger = hocket.plugins.get("loggers", "memory")()
    trainer = hocket.Trainer(
        model=ours,
        loss=F.cross_entropy,
        train_data=data(),
        eval_data=data(40) if evaluated else None,
        eval_every="2ba" if evaluated else "1ep",
        optimizer=optimizer,
        duration="3ep",
        log_every="1ba",
        loggers=[logger],
    )
    torch.manual_seed(3)
    trainer.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(theirs), strict=True))
    assert [value for _, value in logger.metrics["train/loss"]] == losses
    assert [batch for batch, _ in logger.metrics["train/loss"]] == list(range(1, 10))


@pytest.mark.parametrize("microbatch", [1, 3, 7, 32])
def test_microbatches_give_the_whole_batch(data, model, microbatch) -> None:
    """Batches of 32, 32 and 20."""
    ours, theirs = model(), model()
    by_hand(theirs, data(), sgd(theirs.parameters()), 3)
    hocket.Trainer(
        model=ours, loss=F.cross_entropy, train_data=data(), optimizer=sgd, duration="3ep", microbatch=microbatch
    ).fit()
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


class TokenTask(hocket.Task):
    """A language model on sequences of different lengths: its loss is the mean over tokens that are not padding."""

    def __init__(self, named: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.named = nn.Embedding(11, 8), nn.Linear(8, 11), named

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.embedding(batch["input_ids"]))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Any:
        per_token = F.cross_entropy(
            outputs.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        tokens = (batch["labels"] != -100).sum()
        return ({"lm": per_token / tokens} if self.named else per_token / tokens), tokens


def token_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for samples in (32, 32, 20):
        ids = torch.randint(11, (samples, 9), generator=generator)
        lengths = torch.randint(1, 10, (samples,), generator=generator)
        labels = torch.where(torch.arange(9) < lengths[:, None], ids.roll(-1, 1), -100)
        batches.append({"input_ids": ids, "labels": labels})
    return batches


@pytest.mark.parametrize("microbatch", [1, 3, 7, 32, None])
@pytest.mark.parametrize("named", [False, True])
def test_losses_that_are_means_over_tokens(microbatch, named) -> None:
    """The gradient is that of the mean over all tokens of the batch, not of a mean of means."""
    ours, theirs = TokenTask(named), TokenTask()
    optimizer = sgd(theirs.parameters())
    expected = []
    for batch in token_batches() * 3:
        optimizer.zero_grad()
        loss = F.cross_entropy(theirs(batch).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    logger = hocket.plugins.get("loggers", "memory")()
    result = hocket.Trainer(
        model=ours, train_data=token_batches(), optimizer=sgd, duration="3ep", microbatch=microbatch, loggers=[logger],
        log_every="1ba",
    ).fit()  # fmt: skip
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    logged = torch.tensor([value for _, value in logger.metrics["train/loss"]])
    torch.testing.assert_close(logged, torch.tensor(expected), rtol=1e-5, atol=0)
    if named:
        assert torch.equal(torch.tensor([value for _, value in logger.metrics["train/lm"]]), logged)
    assert result.timestamp.token == 3 * 84 * 9


def test_accumulation_does_not_divide_a_last_window_by_too_much() -> None:
    """Lightning 2.2-b: of a window that is not full, the gradient was divided by the full number of microbatches."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    batches = [(torch.ones(4, 1), torch.zeros(4)), (torch.ones(1, 1), torch.zeros(1))]
    gradients: list[float] = []

    class Watch(hocket.Callback):
        def after_train_batch(self, state: hocket.State) -> None:
            gradients.append(state.model.weight.grad.item())

    hocket.Trainer(
        model=model, loss=lambda outputs, targets: outputs.mean(), train_data=batches, duration="1ep", microbatch=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0), callbacks=[Watch()],
    ).fit()  # fmt: skip
    assert gradients == [1.0, 1.0]


def test_fits_in_increments_are_one_fit(data, model) -> None:
    """By epochs, by batches and in the middle of an epoch, schedule included."""

    def train(*increments: str) -> list[Tensor]:
        net = model(dropout=0.2)
        trainer = hocket.Trainer(
            model=net, loss=F.cross_entropy, train_data=data(), optimizer=sgd, schedule="cosine(warmup=0.1dur)",
            duration="4ep", seed=1,
        )  # fmt: skip
        for increment in increments:
            trainer.fit(increment)
        assert trainer.state.timestamp.batch == 12 and trainer.state.timestamp.epoch == 4
        return weights(net)

    whole = train("4ep")
    for increments in (("1ep", "3ep"), ("2ba", "5ba", "5ba"), ("3ba", "1ep", "100sp", "2ba")):
        assert all(torch.equal(a, b) for a, b in zip(train(*increments), whole, strict=True)), increments


def test_counts_do_not_overflow_and_are_not_rounded() -> None:
    """S26: sample and token counts were summed in int32 or float32."""

    class Huge(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, batch: Any) -> Tensor:
            return self.weight * 1.0

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs

        def count(self, batch: Any) -> tuple[int, int]:
            return 2**24 + 1, 2**33 + 1

    def batches() -> Iterator[Any]:
        yield from ([0],) * 3

    result = hocket.Trainer(model=Huge(), train_data=list(batches()), optimizer=sgd, duration="1ep").fit()
    assert (result.timestamp.sample, result.timestamp.token) == (3 * (2**24 + 1), 3 * (2**33 + 1))


def test_microbatches_that_only_keep_others_company_count_nothing(data, model) -> None:
    """A plug-in adds them to each batch, as strategies do whose ranks compute in step: the same loss, metrics and weights."""

    class Company(hocket.Algorithm):
        def split_batch(self, batch: Any, size: int) -> Any:
            return [*batches.split(batch, size), batches.Padding(batches.slice_samples(batch, 0, 1))]

    def run(*algorithms: Any) -> Any:
        seen: list[int] = []
        metric = type("Seen", (), {"update": lambda self, outputs, targets: seen.append(len(targets))})
        metric.reset, metric.compute = lambda self: None, lambda self: float(sum(seen))
        trainer = hocket.Trainer(
            model=model(),
            loss=F.cross_entropy,
            train_data=data(),
            train_metrics={"seen": metric()},
            optimizer=sgd,
            duration="1ep",
            microbatch=3,
            algorithms=algorithms,
        )
        result = trainer.fit()
        return weights(trainer.state.model), float(trainer.state.loss), sum(seen), result.timestamp.sample

    torch.manual_seed(3)
    expected = run()
    torch.manual_seed(3)
    torch.testing.assert_close(run(Company()), expected, rtol=0, atol=1e-6)
