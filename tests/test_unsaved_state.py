"""What training changes outside of parameters and persistent buffers is saved, or said once by name."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import hocket
from hocket.data import seeded
from hocket.state.component import ContentError

DATA = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 3) for i in range(6)]


_numbers_of_folders = itertools.count()


def trainer(model: nn.Module, data: Any = DATA, **arguments: Any) -> hocket.Trainer:
    torch.manual_seed(0)
    nn.init.normal_(next(model.parameters()))
    arguments = {"loss": "cross_entropy", "optimizer": "sgd(lr=0.1)", **arguments}
    return hocket.Trainer(model, data, duration="6ba", device="cpu", seed=3, **arguments)


def said(*args: Any, **arguments: Any) -> str:
    """Return the names in the warning; empty if there is none."""
    return warned(*args, **arguments).partition(" changed in training")[0]


def warned(model: nn.Module, data: Any = DATA, every: str = "3ba", **arguments: Any) -> str:
    """Return the warning, or an empty text."""
    folder = f"checkpoints-{next(_numbers_of_folders)}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(model, data, checkpoints=hocket.Checkpoints(folder, every=every), **arguments).fit()
    texts = [str(each.message) for each in caught if "changed in training" in str(each.message)]
    assert len(texts) <= 1
    return texts[0] if texts else ""


class Net(nn.Linear):
    """Does something with itself in each batch."""

    def __init__(self, start: Any = None, change: Callable[[Any], Any] = lambda net: None) -> None:
        super().__init__(4, 3)
        self.kept, self.change = start, change

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change(self)
        return super().forward(x)


class Box:
    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = 0


def _set(value: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        net.kept = value(net.kept)

    return change


def _box(net: Any) -> None:
    net.kept.inner += 1


def _label(net: Any) -> None:
    net.weight.uses = getattr(net.weight, "uses", 0) + 1


def _numbers() -> Any:
    yield from itertools.count()


@pytest.mark.parametrize(
    ("start", "change", "name"),
    [
        (0, _set(lambda kept: kept + 1), "Net.kept"),
        (False, _set(lambda kept: True), "Net.kept"),  # as of weights that the first batch initializes
        (torch.zeros(2), lambda net: net.kept.add_(1), "Net.kept"),
        (torch.zeros(2), lambda net: net.kept.data.add_(1), "Net.kept"),
        (torch.arange(3), _set(lambda kept: kept.roll(1)), "Net.kept"),
        (np.zeros(2), lambda net: net.kept.__iadd__(1), "Net.kept"),
        ([[0]], lambda net: net.kept[0].append(1), "Net.kept[0]"),
        (deque(), lambda net: net.kept.append(torch.rand(1)), "Net.kept"),
        (set(), lambda net: net.kept.add(len(net.kept)), "Net.kept"),
        (Box(), _box, "Net.kept.inner"),
        (torch.Generator(), lambda net: torch.rand(1, generator=net.kept), "Net.kept"),
        (random.Random(1), lambda net: net.kept.random(), "Net.kept"),
        (np.random.default_rng(1), lambda net: net.kept.random(), "Net.kept"),
        (itertools.count(), lambda net: next(net.kept), "Net.kept"),
        (_numbers(), lambda net: next(net.kept), "Net.kept"),
        (None, _label, "Net.weight.uses"),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str) else "",
)
@pytest.mark.parametrize("every", ["1ba", "5ba"])
def test_what_a_model_keeps_is_named(start: Any, change: Any, name: str, every: str) -> None:
    assert said(Net(start, change), every=every) == name


@pytest.mark.parametrize(
    ("start", "change"),
    [
        (None, lambda net: None),
        (None, _set(lambda kept: torch.ones(4) if kept is None else kept)),  # a cache
        (None, _set(lambda kept: torch.arange(4))),  # the same in each batch
        (torch.ones(2), _set(lambda kept: kept.clone())),
        ({}, lambda net: net.kept.setdefault("mask", torch.ones(2))),
        (None, lambda net: setattr(net, "kept", net.weight.sum(0))),  # a value of the batch, with its graph
    ],
)
def test_caches_are_not_named(start: Any, change: Any) -> None:
    assert said(Net(start, change)) == ""


class Mean:
    """A loss that keeps a mean."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / (1 + self.mean)


class SavedMean(Mean):
    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Count(hocket.Callback):
    batches = 0

    def batch_end(self, state: hocket.State) -> None:
        self.batches += 1


class Fitting(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.batches = nn.Linear(4, 3), 0

    def forward(self, batch: Any) -> Tensor:
        return self.net(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.batches += 1
        return F.cross_entropy(outputs, batch[1])


@pytest.mark.parametrize(
    ("model", "arguments", "advice"),
    [
        (Net(0, _set(lambda kept: kept + 1)), {}, "use register_buffer() in Net for a tensor"),
        (Net(), {"loss": Mean()}, "define state_dict() and load_state_dict(state) in the class of loss."),
        (Net(), {"callbacks": [Count()]}, "load_state_dict(state) in the class of callback 'count'."),
        (Fitting(), {"loss": None}, "return it from Fitting.extra_state()"),
        (Net(None, lambda net, kept=[0]: kept.append(1)), {}, "keep it in an object that defines state_dict()"),
    ],
)
def test_the_advice_is_that_of_the_place(model: nn.Module, arguments: dict[str, Any], advice: str) -> None:
    assert advice in warned(model, **arguments)


class BufferMean(nn.Module):
    """Keeps it in buffers, one of which is not in its state_dict."""

    mean: Tensor
    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("batches", torch.zeros(()), persistent=False)
        self.register_buffer("last", None, persistent=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets)
        self.mean, self.last = 0.9 * self.mean + 0.1 * loss.detach(), self.batches.clone()
        self.batches += 1
        return loss / (1 + self.mean + self.last)


def inside(loss: Any) -> Callable[..., Tensor]:
    return lambda outputs, targets: loss(outputs, targets)


def _counting() -> Callable[..., Tensor]:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(outputs, targets)

    return loss


CALLS = {"n": 0}


def _count_globally() -> None:
    CALLS["n"] += 1


def _global(outputs: Tensor, targets: Tensor) -> Tensor:
    _count_globally()
    return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Mean, "loss.mean"),
        (lambda: inside(Mean()), "loss:loss.mean"),
        (lambda: functools.partial(lambda mean, outputs, targets: mean(outputs, targets), Mean()), "loss.mean"),
        (lambda: Mean().__call__, "loss.mean"),
        (_counting, "loss:calls"),
        (lambda: _global, "CALLS['n']"),
    ],
)
def test_what_a_loss_keeps_is_named(make: Callable[[], Any], name: str) -> None:
    assert said(Net(), loss=make()) == name


class Classwide(Net):
    batches = 0

    def forward(self, x: Tensor) -> Tensor:
        Classwide.batches += 1
        return super().forward(x)


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, item: Any) -> Any:
        self.calls += 1
        return item


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.transform, self.read = Counted(), dict[int, Any]()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return self.read.setdefault(index, self.transform((torch.ones(4), index % 3)))


class PerEpoch(Samples):
    """Is told the epoch, also in a resumed run."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Patience(hocket.Callback):
    def __init__(self) -> None:
        self.bad, self.losses = 0, list[float]()

    def batch_end(self, state: hocket.State) -> None:
        self.bad += 1
        self.losses.append(float(state.loss))  # type: ignore[arg-type]


class Counting(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


def test_what_others_keep_is_named() -> None:
    hooked, calls = Net(), {"n": 0}
    hooked.register_forward_hook(lambda *arguments: calls.update(n=calls["n"] + 1))
    assert said(hooked) == "<lambda>:calls['n']"
    assert said(Classwide()) == "Classwide.batches"
    assert said(Net(), batch_transform=Counted()) == "batch_transform.calls"
    assert said(Net(), DataLoader(Samples(), 8)) == "train_data.dataset.transform.calls"
    assert said(Net(), DataLoader(Subset(Samples(), range(48)), 8)) == "train_data.dataset.dataset.transform.calls"
    assert said(Net(), DataLoader(PerEpoch(), 24)) == ""
    assert said(Net(), DataLoader(seeded(Samples(), seed=1), 8)) == "train_data.dataset.dataset.transform.calls"
    assert said(Net(), callbacks=[Patience()]) == "callback 'patience'.bad"
    assert said(Net(), optimizer=lambda p: Counting(p, lr=0.1)) == "Counting.calls"


class Buffers(nn.Module):
    """Uses a buffer that is not in its state_dict, and a module that it does not register."""

    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("batches", torch.zeros(()), persistent=False)
        self.register_buffer("constant", torch.ones(1000), persistent=False)
        self.hidden = [nn.BatchNorm1d(4, momentum=0.3)]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
        return self.linear(self.hidden[0](x) / (1 + self.batches))


class SavedTransform(Counted):
    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return [batch[0] / self.calls, batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (Buffers, dict),
        (Net, lambda: {"loss": BufferMean()}),
        (Net, lambda: {"loss": inside(BufferMean())}),
        (Net, lambda: {"loss": SavedMean()}),
        (Net, lambda: {"loss": inside(SavedMean())}),
        (Net, lambda: {"batch_transform": SavedTransform()}),
        (Net, lambda: {"batch_transform": [SavedTransform(), SavedTransform()]}),
    ],
)
@pytest.mark.filterwarnings("error")
def test_it_is_resumed_bitwise(model: type[nn.Module], arguments: Callable[[], dict[str, Any]]) -> None:
    whole = trainer(model(), **arguments())
    whole.fit()
    trainer(model(), checkpoints=hocket.Checkpoints("c", every="1ba"), **arguments()).fit("3ba")
    cut = trainer(model(), checkpoints=hocket.Checkpoints("c", every="1ba"), resume="auto", **arguments())
    cut.fit("1ba")  # a buffer that was restored is saved again
    resumed = trainer(model(), checkpoints=hocket.Checkpoints("c", every="1ba"), resume="auto", **arguments())
    assert resumed.state.timestamp.batch == 4
    resumed.fit()
    assert all(map(torch.equal, weights(resumed), weights(whole)))


def test_empty_tensors_have_a_fingerprint() -> None:
    from hocket_checkpoints.reachable_state import fingerprint, same

    assert same(fingerprint(torch.empty(0, 3)), fingerprint(torch.empty(0, 3)))


def test_only_buffers_that_changed_are_saved_and_weights_have_none() -> None:
    made = trainer(Buffers())
    made.fit()
    (rank,) = made.state_dict()["ranks"]
    names = [name.rpartition(".")[2] for name in rank["hidden"]["buffers"]]
    assert names == ["batches", "running_mean", "running_var", "num_batches_tracked"]
    assert "batches" not in made.model_state_dict()


def test_a_state_that_nothing_takes_is_refused() -> None:
    made, other = trainer(Net(), loss=SavedMean()), trainer(Net(), loss=Mean())
    made.fit()
    with pytest.raises(ContentError, match="the state of loss, and nothing here takes it"):
        other.load_state_dict(made.state_dict())


def test_older_checkpoints_have_none() -> None:
    made, other = trainer(Buffers()), trainer(Buffers())
    made.fit()
    tree = made.state_dict()
    del tree["ranks"][0]["hidden"], tree["history"], tree["costs"]
    other.load_state_dict(tree)
    assert all(map(torch.equal, weights(other), weights(made)))


def test_a_state_that_cannot_be_saved_is_said_once() -> None:
    class Odd(Mean):
        def state_dict(self) -> dict[str, Any]:
            return {"self": self}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.warns(
        UserWarning, match=r"do not hold the state of loss: state_dict\(\) of loss/self holds a .*Odd"
    ) as caught:
        trainer(Net(), loss=Odd(), checkpoints=hocket.Checkpoints("c", every="1ba")).fit()
    assert len(caught) == 1


def test_a_metric_of_the_run_is_no_state() -> None:
    """Its values are saved with the epoch in progress, or those of one evaluation."""

    class Largest:
        def __init__(self) -> None:
            self.value = 0.0

        def reset(self) -> None:
            self.value = 0.0

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.value = max(self.value, float(outputs.max()))

        def compute(self) -> float:
            return self.value

    class Measured(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.made = nn.Linear(4, 3), dict[str, Any]()

        def forward(self, batch: Any) -> Any:
            return self.layer(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return F.cross_entropy(outputs, batch[1])

        def metrics(self, split: str) -> dict[str, Any]:
            return self.made.setdefault(split, {"largest": Largest()})

    assert said(Measured(), loss=None, eval_data=DATA) == ""
