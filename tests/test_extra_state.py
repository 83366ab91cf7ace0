"""What a Task keeps besides parameters and buffers is in checkpoints, or is said not to be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import weights
from torch import Tensor, nn

import hocket
from hocket.state.component import ContentError

DATA = [(torch.full((3, 3, 2), float(i)), torch.zeros(3)) for i in range(6)]


class Recurrent(hocket.Task):
    """Carries its hidden state from batch to batch, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(2, 4)
        self.hidden: Tensor | None = None

    def forward(self, batch: Any) -> Any:
        outputs, hidden = self.cell(batch[0], self.hidden)
        self.hidden = hidden.detach()
        return outputs

    def loss(self, outputs: Any, batch: Any) -> Any:
        return (outputs - 1).square().mean()


class Saved(Recurrent):
    """Says what it carries."""

    def extra_state(self) -> Any:
        return {"hidden": self.hidden}

    def load_extra_state(self, state: Any) -> None:
        self.hidden = state["hidden"]


def trainer(task: type[hocket.Task], **arguments: Any) -> hocket.Trainer:
    torch.manual_seed(0)
    return hocket.Trainer(
        model=task(), train_data=DATA, optimizer="sgd(lr=0.1)", duration="6ba", device="cpu", seed=1, **arguments
    )


@pytest.mark.filterwarnings("error")
def test_an_extra_state_is_resumed() -> None:
    """As in a loop without interruption, written by hand."""
    torch.manual_seed(0)
    task = Saved()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    for batch in DATA:
        optimizer.zero_grad()
        task.loss(task(batch), batch).backward()
        optimizer.step()
    trainer(Saved, checkpoints=hocket.Checkpoints("c", every="1ba")).fit("3ba")
    resumed = trainer(Saved, checkpoints=hocket.Checkpoints("c", every="1ba"), resume="auto")
    resumed.fit()
    for got, expected in zip(weights(resumed), task.state_dict().values(), strict=True):
        assert torch.equal(got, expected)


def test_an_extra_state_that_nobody_takes_is_refused() -> None:
    class Forgets(Saved):
        load_extra_state = hocket.Task.load_extra_state

    made, other = trainer(Saved), trainer(Forgets)
    made.fit("2ba")
    before = weights(other)
    with pytest.raises(ContentError, match=r"Forgets does not define load_extra_state\(state\).*strict=False"):
        other.load_state_dict(made.state_dict())
    assert all(map(torch.equal, weights(other), before)), "nothing was loaded"
    with pytest.warns(UserWarning, match="Forgets does not define"):
        other.load_state_dict(made.state_dict(), strict=False)
    assert all(map(torch.equal, weights(other), weights(made)))


def test_checkpoints_of_before_have_none() -> None:
    made = trainer(Saved)
    made.fit("2ba")
    tree = made.state_dict()
    for rank in tree["ranks"]:
        del rank["task"]
    other = trainer(Saved)
    other.load_state_dict(tree)
    assert other.state.task.hidden is None  # type: ignore[attr-defined]


def test_what_cannot_be_saved_is_refused_by_name() -> None:
    class Odd(Recurrent):
        def extra_state(self) -> Any:
            return {"inner": [object()]}

    with pytest.raises(TypeError, match=r"extra_state\(\) of Odd/inner/0 holds a object"):
        trainer(Odd).state_dict()


# --- hidden tensors


def said(task: type[hocket.Task], every: str = "1ba") -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(task, checkpoints=hocket.Checkpoints(task.__name__, every=every)).fit()
    return [str(each.message) for each in caught if "extra_state" in str(each.message)]


class InAList(Recurrent):
    """Carries it deeper."""

    def forward(self, batch: Any) -> Any:
        outputs, hidden = self.cell(batch[0], getattr(self.cell, "memory", [None])[0])
        self.cell.memory = [hidden.detach()]
        return outputs


class InPlace(Recurrent):
    """Writes into a tensor that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = {"all": torch.zeros(4)}

    def forward(self, batch: Any) -> Any:
        outputs, _ = self.cell(batch[0])
        self.sums["all"] += outputs.detach().sum((0, 1))
        return outputs


@pytest.mark.parametrize(
    ("task", "name"),
    [(Recurrent, "Recurrent.hidden"), (InAList, "InAList.cell.memory[0]"), (InPlace, "InPlace.sums['all']")],
)
@pytest.mark.parametrize("every", ["1ba", "6ba"])
def test_tensors_carried_in_attributes_are_named_once(task: type[hocket.Task], name: str, every: str) -> None:
    (message,) = said(task, every)
    assert message.startswith(f"{name} changed in training") and "load_extra_state(state)" in message


class Cached(Recurrent):
    """Has constants, a cache that the first batch fills, buffers that are not saved, and keeps its last outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.constant, self.cache, self.last = torch.ones(4), None, None
        self.again = [self.table, *self.cell.parameters()]

    def forward(self, batch: Any) -> Any:
        if self.cache is None:
            self.cache = torch.arange(4.0)
        self.table += 1
        self.last, _ = self.cell(batch[0])
        return self.last + 0 * self.cache


def test_caches_constants_and_buffers_are_not_named() -> None:
    assert said(Cached) == []
    assert said(Saved) == []


class Measured(hocket.Task):
    """Logs metrics, whose states are tensors in attributes and which checkpoints save."""

    def __init__(self) -> None:
        super().__init__()
        metrics = pytest.importorskip("torchmetrics")
        self.layer = nn.Linear(2, 1)
        self.each = metrics.MetricCollection({"mean": metrics.MeanMetric(), "largest": metrics.MaxMetric()})

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.each.update(outputs.detach())
        self.log(dict(self.each.items()), over="epoch")
        return outputs.square().mean()


@pytest.mark.filterwarnings("error")
def test_metrics_that_are_logged_need_no_extra_state(tmp_path: Any) -> None:
    arguments: dict[str, Any] = {"checkpoints": hocket.Checkpoints(tmp_path, every="2ba"), "resume": "auto"}
    whole = trainer(Measured).fit().metrics
    trainer(Measured, **arguments).fit("4ba")
    resumed = trainer(Measured, **arguments).fit().metrics
    names = ("train/mean", "train/largest")
    assert [resumed[name] for name in names] == [whole[name] for name in names]
