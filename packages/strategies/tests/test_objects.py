"""Objects that ranks send each other: no tensor is bound to a device of its sender."""

from __future__ import annotations

import pickletools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.basics import objects
from hocket.basics.objects import pack, unpack
from hocket.loggers.memory import MemoryLogger
from hocket.state.simple_metrics import Accuracy
from hocket_testkit import run_ranks


class Elsewhere(Tensor):
    """A tensor that says that it is on a GPU, as one of rank 1 would."""

    device = torch.device("cuda:1")  # type: ignore[assignment]

    def cpu(self, *args: Any) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).clone()

    def detach(self) -> Tensor:
        return self


def elsewhere(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(Elsewhere)


class State:
    """A metric: an object whose attributes are tensors, and their device."""

    def __init__(self) -> None:
        self.total, self.parts, self.device = elsewhere(3), [elsewhere(1), elsewhere(2)], torch.device("cuda:1")


@pytest.fixture
def on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of devices that tensors are moved to; there is no GPU to move them to."""
    kinds: list[str] = []
    empty = torch.empty

    def here(*size: Any, device: Any = None, **options: Any) -> Tensor:
        kinds.append(str(device))
        return empty(*size, **options)

    monkeypatch.setattr(objects.torch, "empty", here)
    return kinds


@pytest.mark.parametrize(
    "make",
    [
        lambda: elsewhere(1, 2),
        lambda: {"a": [elsewhere(1), (elsewhere(2), "text")]},
        State,
        lambda: nn.ParameterDict({"w": nn.Parameter(torch.ones(2))}),
        lambda: torch.device("cuda:1"),
        lambda: (torch.ones(2), 3, None, torch.device("cpu")),
        Accuracy,
    ],
    ids=["tensor", "nested", "object", "module", "device", "on the cpu", "metric"],
)
def test_bytes_name_no_device(make: Any, on_this_gpu: list[str]) -> None:
    content = pack(make())
    said = [str(argument) for _, argument, _ in pickletools.genops(content) if argument is not None]
    assert not any("cuda:" in each for each in said)
    unpack(content)
    assert set(on_this_gpu) <= {"cuda", "cpu"}, "the current one of the process, without a number"
    before = len(on_this_gpu)
    unpack(content, "cpu")
    assert "cuda" not in on_this_gpu[before:]


def test_what_arrives_is_what_was_sent(on_this_gpu: list[str]) -> None:
    got = unpack(pack(State()))
    assert got.total.tolist() == [3] and [each.tolist() for each in got.parts] == [[1], [2]]
    assert type(got.total) is Tensor and got.device == torch.device("cpu"), "where torch.empty is in this test"
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    (again,) = unpack(pack([frozen]))
    assert type(again) is nn.Parameter and not again.requires_grad and torch.equal(again, frozen)


def test_every_collective_of_objects_sends_bytes() -> None:
    """Of every strategy, those of other packages too."""
    sent: list[Any] = []

    class Two(hocket.Strategy):
        world_size = 2

        def all_gather_object(self, item: Any) -> list[Any]:
            sent.append(item)
            return [item, item]

        def broadcast_object(self, item: Any) -> Any:
            sent.append(item)
            return item

    assert [each.tolist() for each in Two().all_gather_object(torch.ones(1))] == [[1.0], [1.0]]
    assert Two().broadcast_object({"a": torch.ones(2)})["a"].tolist() == [1.0, 1.0]
    assert list(map(type, sent)) == [bytes, bytes]


def test_ranks_exchange_them(on_this_gpu: list[str]) -> None:
    def rank_main(rank: int) -> Any:
        trainer = hocket.Trainer(model=nn.Linear(2, 1), strategy="ddp", device="cpu", loggers=[MemoryLogger()])
        bus, item = trainer.state.bus, {"rank": rank, "tensor": elsewhere(rank)}
        return [each["tensor"].item() for each in bus.all_gather_object(item)], bus.broadcast_object(item)

    for gathered, broadcast in run_ranks(rank_main, 2):
        assert gathered == [0, 1] and broadcast["rank"] == 0 and broadcast["tensor"].item() == 0
