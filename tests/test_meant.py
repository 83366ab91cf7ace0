"""What an author probably means is done, or is an error of one paragraph; nothing else is trained in silence.

Other cases of the same kinds are in test_evaluation.py (eval mode), test_losses.py (sums, means), test_data_checks.py (samples)
and test_two_trainers.py (plug-ins).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

import hocket
from hocket.schedules import Cosine, Plateau, Schedule
from hocket.state.simple_metrics import METRICS
from hocket_testkit import run_ranks

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
BATCHES = [(X[:8], Y[:8]), (X[8:], Y[8:])]


def make(model: nn.Module | None = None, **arguments: Any) -> hocket.Trainer:
    torch.manual_seed(1)
    given = {"loss": "cross_entropy", "optimizer": "sgd(lr=0.1)", "duration": "1ep", "device": "cpu", **arguments}
    return hocket.Trainer(model or nn.Linear(4, 2), **given)


def one_paragraph(act: Callable[[], Any], *words: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        act()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


# --- a model that begins in eval mode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))  # type: ignore[no-any-return]


def by_hand(net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, epochs: int = 2) -> nn.Module:
    """Plain PyTorch, in the modes that the modules are in."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in BATCHES * epochs:
        optimizer.zero_grad()
        loss(net(inputs), targets).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize(
    ("begin", "meant", "warns"),
    [
        (lambda net: net.eval(), lambda net: net.train(), "put into train mode"),
        (lambda net: net.backbone.eval(), lambda net: net.backbone.eval(), "do not train: backbone"),
        (lambda net: net.backbone[1].eval(), lambda net: net.backbone[1].eval(), None),
        (
            lambda net: net.backbone.eval().requires_grad_(False),
            lambda net: net.backbone.eval().requires_grad_(False),
            None,
        ),
    ],
    ids=["whole", "backbone", "one norm", "frozen backbone"],
)
@pytest.mark.parametrize("evaluated", [False, True])
def test_modes(begin: Any, meant: Any, warns: str | None, evaluated: bool, recwarn: pytest.WarningsRecorder) -> None:
    """All of it in eval mode is trained in train mode, and said; a part in eval mode stays so, also after evaluations."""
    net, expected = Net(), Net()
    begin(net)
    meant(expected)
    make(net, train_data=BATCHES, eval_data=BATCHES if evaluated else None, duration="2ep").fit()
    by_hand(expected)
    assert all(
        torch.equal(a, b) for a, b in zip(net.state_dict().values(), expected.state_dict().values(), strict=True)
    )
    said = [str(each.message) for each in recwarn if "eval mode" in str(each.message)]
    assert [warns in each for each in said] == ([True] if warns else [])


# --- a loss that sums


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").sum()


class Steps(hocket.Task):
    """A Task of steps whose loss function is ``function``."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Linear(4, 2)
        self.function = function

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.step_loss, batch)

    def step_loss(self, batch: Any) -> Any:
        return self.function(self.network(batch[0]), batch[1])


class OneLoss(Steps):
    """The same as a Task of one step."""

    train_batch = hocket.Task.train_batch

    def forward(self, batch: Any) -> Any:
        return self.network(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return self.function(outputs, batch[1])


SUMS = {
    "function": lambda: {"loss": total},
    "Task": lambda: {"model": OneLoss(total), "loss": None},
    "step": lambda: {"model": Steps(total), "loss": None},
}


@pytest.mark.parametrize("given", SUMS.values(), ids=SUMS)
def test_an_undeclared_sum(given: Callable[[], dict[str, Any]]) -> None:
    """A full batch trains on the sum, as in plain PyTorch. In parts, sum and mean differ, and it has to be said which."""
    trainer = make(train_data=BATCHES, **given(), duration="2ep")
    trainer.fit()
    torch.manual_seed(1)
    expected = by_hand(nn.Linear(4, 2), total).state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(trainer.model_state_dict().values(), expected, strict=True))
    for parts in ({"microbatch": 4}, {"accumulate": "2ba"}):
        words = "is a sum over samples and not a mean", "loss_reduction='sum'"
        one_paragraph(lambda parts=parts: make(train_data=BATCHES, **given(), **parts).fit(), *words)
    for parts in ({"microbatch": 4}, {}):
        said = make(train_data=BATCHES, **given(), loss_reduction="sum", duration="2ep", **parts)
        said.fit()
        for mine, theirs in zip(said.model_state_dict().values(), expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_sum_in_a_custom_loop() -> None:
    runtime = hocket.Runtime(device="cpu")
    net = nn.Linear(4, 2)
    model, optimizer = runtime.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    step = runtime.stepper(model, optimizer, microbatch=4)
    one_paragraph(lambda: step(lambda batch: total(model(batch[0]), batch[1]), BATCHES[0]), "is a sum over samples")


def test_a_sum_over_ranks(tmp_path: Path) -> None:
    """Each rank has half of each batch: undeclared it is refused on both; torch's own declares itself."""

    def main(rank: int) -> Any:
        given = {
            "train_data": DataLoader(TensorDataset(X, Y), 4),
            "global_batch": 8,
            "strategy": "ddp",
            "folder": tmp_path,
        }
        with pytest.raises(ValueError, match="is a sum over samples"):
            make(loss=total, **given).fit()
        trainer = make(loss=nn.CrossEntropyLoss(reduction="sum"), **given)
        trainer.fit()
        weights = {name: value.clone() for name, value in trainer.model_state_dict().items()}
        return weights, trainer.evaluate(DataLoader(TensorDataset(X, Y), 8))

    (first, evaluated), (second, _) = run_ranks(main, 2)
    torch.manual_seed(1)
    expected = by_hand(nn.Linear(4, 2), total, epochs=1)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(first[name], value)
        assert torch.equal(first[name], second[name])
    assert evaluated["eval/loss"] == pytest.approx(F.cross_entropy(expected(X), Y).item())


# --- two losses


def two(outputs: Tensor, targets: Tensor) -> list[Tensor]:
    return [F.cross_entropy(outputs, targets), outputs.square().mean()]


@pytest.mark.parametrize("form", [tuple, list, lambda losses: (*losses, losses[0])], ids=["pair", "list", "three"])
def test_losses_in_a_sequence_are_refused(form: Callable[[Any], Any]) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Any:
        return form(two(outputs, targets))

    words = ["'a': a, 'b': b}"]
    one_paragraph(lambda: make(train_data=BATCHES, loss=loss).fit(), *words)
    one_paragraph(lambda: make(train_data=BATCHES, loss=loss, microbatch=4).fit(), *words)
    one_paragraph(lambda: make(loss=loss).evaluate(BATCHES), *words)
    one_paragraph(lambda: make(OneLoss(loss), loss=None).evaluate(BATCHES), *words)
    one_paragraph(lambda: make(Steps(loss), loss=None, train_data=BATCHES).fit(), *words)


def test_a_dict_of_losses_is_their_sum() -> None:
    trainer = make(
        train_data=BATCHES, loss=lambda outputs, targets: dict(zip("ab", two(outputs, targets), strict=True))
    )
    trainer.fit("2ep")
    torch.manual_seed(1)
    expected = by_hand(nn.Linear(4, 2), lambda outputs, targets: sum(two(outputs, targets), torch.zeros(())))
    for mine, theirs in zip(trainer.model_state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("weight", [7, 7.5, torch.tensor(7), torch.tensor(7.5)])
def test_a_mean_and_its_weight_are_evaluated_as_such(weight: Any) -> None:
    """Only a second loss is refused; checking for one draws no random numbers and changes nothing."""
    calls = []

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        calls.append(torch.rand(1))
        return F.cross_entropy(outputs, targets), weight

    trainer = make(loss=loss, seed=3)
    expected = sum(F.cross_entropy(trainer.state.model(x), y).item() for x, y in BATCHES) / 2
    assert trainer.evaluate(BATCHES)["eval/loss"] == pytest.approx(expected)
    count = len(calls)
    assert count == (3 if isinstance(weight, Tensor) and weight.is_floating_point() else 2)
    trainer.evaluate(BATCHES)
    assert torch.equal(calls[0], calls[count])


# --- data that can be iterated once


def generator() -> Iterator[Any]:
    yield from BATCHES


class Own:
    """An iterator without the type of one of Python's."""

    def __init__(self) -> None:
        self.batches = iter(BATCHES)

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> Any:
        return next(self.batches)


class Stale:
    """An iterable that returns the same iterator each time."""

    def __init__(self) -> None:
        self.batches = iter(BATCHES)

    def __iter__(self) -> Iterator[Any]:
        return self.batches


ONCE: dict[str, Callable[[], Any]] = {
    "generator": generator,
    "iter": lambda: iter(BATCHES),
    "reversed": lambda: reversed(BATCHES),
    "zip": lambda: zip([X[:8], X[8:]], [Y[:8], Y[8:]], strict=True),
    "map": lambda: map(tuple, BATCHES),
    "filter": lambda: filter(len, BATCHES),
    "chain": lambda: itertools.chain(BATCHES[:1], BATCHES[1:]),
    "islice": lambda: itertools.islice(BATCHES, 2),
    "tee": lambda: itertools.tee(BATCHES)[0],
    "iterator of a loader": lambda: iter(DataLoader(TensorDataset(X, Y), 8)),
    "own": Own,
    "stale": Stale,
}


@pytest.mark.parametrize("once", ONCE.values(), ids=ONCE)
def test_iterators_train_for_one_epoch_and_are_refused_for_more(once: Callable[[], Any]) -> None:
    assert make(train_data=once()).fit().timestamp.batch == 2
    one_paragraph(lambda: make(train_data=once(), duration="2ep").fit(), "The training data (")
    one_paragraph(lambda: make(train_data=once(), duration="3ba").fit(), "The training data (")
    used = once()
    list(itertools.islice(used, 2))
    one_paragraph(lambda: make(train_data=used).fit(), "yielded no batch")
    trainer, data = make(duration="2ep"), once()
    trainer.fit(data, duration="1ep")
    one_paragraph(lambda: trainer.fit(duration="1ep"), "yielded no batch")
    data = once()
    trainer.evaluate(data)
    one_paragraph(lambda: trainer.evaluate(data), "yielded no batch", "starts anew")


def test_an_iterable_that_is_used_up_is_told_from_an_empty_one() -> None:
    one_paragraph(
        lambda: make(train_data=Stale(), duration="2ep").fit(),
        "yielded no batch in this epoch, and 2 in the last one", "returns the same iterator each time",
    )  # fmt: skip


def test_data_without_an_end() -> None:
    assert make(train_data=itertools.cycle(BATCHES), duration="5ba").fit().timestamp.batch == 5
    one_paragraph(lambda: make(train_data=itertools.cycle(BATCHES)).fit(), "never ends", "'1000ba'")
    one_paragraph(
        lambda: make(eval_data={"test": itertools.cycle(BATCHES)}), "set 'test' (cycle) never ends", "limit_eval="
    )
    one_paragraph(lambda: make().predict(itertools.cycle(BATCHES)), "never ends", "limit_predict=100")
    assert len(make(limit_predict=3).predict(itertools.cycle(BATCHES))) == 3
    assert make(limit_eval=2).evaluate(itertools.cycle(BATCHES)) == make().evaluate(BATCHES)


def test_functions_that_make_data_are_not_called() -> None:
    one_paragraph(lambda: make(train_data=generator), "the function generator", "train_data=list(generator(…))")
    one_paragraph(lambda: make(train_data=lambda: BATCHES), "Call it")
    one_paragraph(lambda: make(train_data=DataLoader), "the class DataLoader", "Call it")


# --- samples in the place of batches


class Stream(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


PAIRS = [(x, y) for x, y in zip(X, Y, strict=True)]
ROWS = [{"x": x, "y": y} for x, y in PAIRS]
SAMPLES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "map-style": (lambda: TensorDataset(X, Y), {}),
    "subset": (lambda: Subset(TensorDataset(X, Y), [0, 1]), {}),
    "joined": (lambda: ConcatDataset([TensorDataset(X, Y)]), {}),
    "iterable": (lambda: Stream(PAIRS), {}),
    "iterables": (lambda: ChainDataset([Stream(PAIRS)]), {}),
    "a list": (lambda: PAIRS, {}),
    "a deque": (lambda: deque(PAIRS), {}),
    "a zip": (lambda: zip(X, Y, strict=True), {}),
    "a generator": (lambda: (pair for pair in PAIRS), {}),
    "rows": (lambda: ROWS, {"inputs": "x", "targets": "y"}),
    "iterable rows": (lambda: Stream(ROWS), {"inputs": "x", "targets": "y"}),
    "for a Task": (lambda: Stream(PAIRS), {"model": OneLoss(F.cross_entropy), "loss": None}),
    "a tensor": (lambda: X, {}),
    "tensors": (lambda: (X, Y), {}),
    "an array": (lambda: X.numpy(), {}),
    "arrays": (lambda: [X.numpy(), Y.numpy()], {}),
}


@pytest.mark.parametrize(("data", "arguments"), SAMPLES.values(), ids=SAMPLES)
def test_samples_are_not_trained_on_one_by_one(data: Callable[[], Any], arguments: dict[str, Any]) -> None:
    one_paragraph(lambda: make(train_data=data(), **arguments).fit(), "DataLoader(", "batch_size=32")


def test_a_loader_without_a_batch_size_is_meant() -> None:
    """As its message says: items of ``batch_size=None`` are batches, and what looks like samples is said."""
    assert make(train_data=DataLoader(Stream(BATCHES), batch_size=None)).fit().timestamp.batch == len(BATCHES)
    assert make(train_data=Stream(BATCHES)).fit().timestamp.batch == 2
    with pytest.warns(UserWarning, match=r"looks like a single sample.*not batch_size=None"):
        make(train_data=DataLoader(Stream(PAIRS), batch_size=None)).fit()


# --- one instance in two Trainers


def rates(schedules: list[Any]) -> list[list[float]]:
    """Return the learning rates of two Trainers of different lengths and data, which take turns."""
    trainers, found = [], []
    for number, schedule in enumerate(schedules):
        noted: list[float] = []
        batch_end = lambda self, state, noted=noted: noted.append(state.optimizers[0].param_groups[0]["lr"])  # noqa: E731
        callback = type("Rates", (hocket.Callback,), {"batch_end": batch_end})()
        evaluated = [(X, Y if number else 1 - Y)]
        trainers.append(
            make(
                train_data=BATCHES,
                eval_data=evaluated,
                schedule=schedule,
                **({"schedule_every": "1ba"} if callable(schedule) and not isinstance(schedule, Schedule) else {}),
                callbacks=[callback],
                duration=f"{4 + 4 * number}ep",
            )
        )
        found.append(noted)
    for _ in range(4):
        trainers[0].fit("1ep")
        trainers[1].fit("2ep")
    return found


@pytest.mark.parametrize(
    "made",
    [
        lambda: Cosine(warmup="0.2dur"),
        lambda: Plateau("eval/loss", patience=0, factor=0.5),
        lambda: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        lambda: "step(step_size='2ba')",
    ],
    ids=["cosine", "plateau", "function", "name"],
)
def test_one_schedule_for_two_trainers_is_as_two(made: Callable[[], Any]) -> None:
    shared = made()
    assert rates([shared, shared]) == rates([made(), made()])


def test_one_metric_for_two_trainers_is_as_two() -> None:
    def measured(first: Any, second: Any) -> list[Any]:
        one = make(train_data=BATCHES, train_metrics={"accuracy": first}, metrics={"a": first}, eval_data=BATCHES)
        flipped = [(x, 1 - y) for x, y in BATCHES]
        other = make(train_data=flipped, train_metrics={"accuracy": second}, metrics={"a": second}, eval_data=flipped)
        one.fit("1ba")  # in the middle of an epoch
        other.fit("1ba")
        return [dict(each.fit("1ba").metrics) for each in (one, other)]

    metric = METRICS["accuracy"]
    shared = metric()
    assert measured(shared, shared) == measured(metric(), metric())


def test_one_optimizer_continues_with_its_model_and_is_refused_for_another() -> None:
    """As in plain PyTorch: the second Trainer begins with the optimizer's state, at the learning rate that it was made with."""
    net, expected = nn.Linear(4, 2), nn.Linear(4, 2)
    expected.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    make(net, train_data=BATCHES, optimizer=optimizer).fit()
    make(net, train_data=BATCHES, optimizer=optimizer).fit()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in BATCHES * 2:
        plain.zero_grad()
        F.cross_entropy(expected(inputs), targets).backward()
        plain.step()
    assert torch.equal(net.weight, expected.weight)
    one_paragraph(lambda: make(train_data=BATCHES, optimizer=optimizer), "optimizer")


@pytest.mark.parametrize("fitted", [True, False], ids=["one after another", "at the same time"])
def test_one_checkpoints_object_for_two_trainers_is_refused(fitted: bool, tmp_path: Path) -> None:
    checkpoints = hocket.Checkpoints(tmp_path / "stored")
    first = make(train_data=BATCHES, checkpoints=checkpoints, folder=tmp_path)
    if fitted:
        first.fit()
        one_paragraph(
            lambda: make(train_data=BATCHES, checkpoints=checkpoints, folder=tmp_path), "resume='auto'", "overwrite"
        )
    else:
        make(train_data=BATCHES, checkpoints=checkpoints, folder=tmp_path)
        one_paragraph(first.fit, "were given to another Trainer", "Give each Trainer its own")


@pytest.mark.parametrize(
    ("given", "said"),
    [({"fast_dev_run": 2, "overfit": 2}, "overfit=2 and fast_dev_run=2"), ({"eval_every": "1ba"}, "no evaluation set")],
)
def test_tests_and_intervals_without_effect_are_said(given: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        make(train_data=BATCHES, **given).fit()
