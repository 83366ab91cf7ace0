"""A snapshot restores, in place, whatever can be reached: every kind of object, changed in every way."""

from __future__ import annotations

import collections
import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hocket_tools.tuning.snapshot import Snapshot

TOTAL = 0


@dataclass(slots=True)
class Slots:
    value: int = 1
    other: Any = None


class Own:
    shared = [1]
    number = 1

    def __init__(self) -> None:
        self.value, self.items = 1, [1, [2]]

    def count(self) -> None:
        global TOTAL
        TOTAL += 1


def counter() -> Callable[[], int]:
    number, calls = 0, []

    def count() -> int:
        nonlocal number
        number += 1
        calls.append(number)
        return number + len(calls)

    return count


def change_list(value: list[Any]) -> None:
    value[1].append(3)
    value[0] = 5
    value.append(None)


def change_order(value: dict[str, int]) -> None:
    value["a"] = value.pop("a")


def change_own(value: Own) -> None:
    value.items[1].append(3)
    value.new = 1
    value.value = 2
    Own.shared.append(2)
    Own.number += 1


def change_module(value: nn.Module) -> None:
    value.eval()
    value.weight.data.mul_(2)
    value.weight.requires_grad_(False)
    value.bias = nn.Parameter(torch.zeros(3))
    value.register_buffer("seen", torch.ones(1))
    value.register_forward_hook(lambda *given: None)
    value.extra = nn.Linear(1, 1)


def change_data(value: torch.Tensor) -> None:
    value.data = torch.zeros(7)


def change_optimizer(value: torch.optim.Optimizer) -> None:
    value.param_groups[0]["params"][0].grad = torch.ones(2)
    value.step()
    value.param_groups[0]["lr"] = 9.0
    value.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1.0})


def change_grad(value: torch.Tensor) -> None:
    value.grad.mul_(0)
    value.grad = None


def with_grad() -> torch.Tensor:
    value = torch.ones(2, requires_grad=True)
    value.grad = torch.full((2,), 3.0)
    return value


def momentum() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


def seen(value: Any) -> Any:
    """What can be told of a value."""
    if isinstance(value, torch.Tensor):
        return (
            value.tolist(),
            value.requires_grad,
            None if value.grad is None else (id(value.grad), value.grad.tolist()),
        )
    if isinstance(value, nn.Module):
        return (
            {name: (id(each), seen(each)) for name, each in value.state_dict(keep_vars=True).items()},
            [(id(module), module.training, len(module._forward_hooks)) for module in value.modules()],
        )
    if isinstance(value, torch.optim.Optimizer):
        return copy.deepcopy(value.state_dict()), [
            [id(each) for each in group["params"]] for group in value.param_groups
        ]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Own):
        return copy.deepcopy(vars(value)), list(Own.shared), Own.number, TOTAL
    if isinstance(value, Slots):
        return value.value, copy.deepcopy(value.other)
    if isinstance(value, dict):
        return [(key, copy.deepcopy(each)) for key, each in value.items()]
    if callable(value):
        return [copy.deepcopy(cell.cell_contents) for cell in getattr(value, "func", value).__closure__]
    return copy.deepcopy(value)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [1, [2]], change_list),
    "dict": (lambda: {"a": 1, "b": [2]}, lambda value: (value["b"].append(1), value.update(c=1))),
    "order": (lambda: {"a": 1, "b": 2}, change_order),
    "counter": (lambda: collections.Counter("aab"), lambda value: value.update("bcc")),
    "default": (lambda: collections.defaultdict(list, a=[1]), lambda value: value["b"].append(1)),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "set": (lambda: {1, 2}, lambda value: value.add(3)),
    "bytearray": (lambda: bytearray(b"ab"), lambda value: value.extend(b"c")),
    "tuple": (lambda: (1, [2]), lambda value: value[1].append(3)),
    "slots": (lambda: Slots(1, [2]), lambda value: (value.other.append(1), setattr(value, "value", 2))),
    "own": (Own, change_own),
    "global": (Own, lambda value: value.count()),
    "closure": (counter, lambda value: value()),
    "partial": (lambda: functools.partial(counter()), lambda value: value()),
    "array": (lambda: np.arange(3.0), lambda value: value.fill(7)),
    "numpy": (lambda: np.random.default_rng(1), lambda value: value.normal()),
    "random": (lambda: random.Random(1), lambda value: value.gauss(0, 1)),
    "generator": (lambda: torch.Generator().manual_seed(1), lambda value: torch.rand(1, generator=value)),
    "tensor": (lambda: torch.tensor([1.0, float("nan")]), lambda value: value.zero_()),
    "data": (lambda: torch.ones(3), change_data),
    "grad": (with_grad, change_grad),
    "module": (lambda: nn.Linear(2, 3), change_module),
    "norm": (lambda: nn.BatchNorm1d(2), lambda value: value(torch.randn(4, 2))),
    "optimizer": (momentum, change_optimizer),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_restored(name: str) -> None:
    make, change = CASES[name]
    value = make()
    before, state = repr(seen(value)), torch.get_rng_state()
    snapshot = Snapshot([SimpleNamespace(inside={"of": (value,)})])
    change(value)
    torch.rand(1)
    assert repr(seen(value)) != before
    snapshot.restore()
    assert repr(seen(value)) == before and torch.equal(torch.get_rng_state(), state)


def test_samples_of_data_sets_are_not_copied_and_small_state_is() -> None:
    class Samples(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.large, self.small, self.read = torch.zeros(2**21), torch.zeros(2), 0
            self.rows = [torch.zeros(1) for _ in range(2000)]

    data = Samples()
    snapshot = Snapshot([{"data": data}], [data])
    for tensor in (data.large, data.small, data.rows[0]):
        tensor.fill_(1)
    data.read, data.rows[1] = 3, None
    snapshot.restore()
    assert data.large[0] == 1 and data.rows[0] == 1
    assert data.small[0] == 0 and data.read == 0 and data.rows[1] is not None


def test_loops_resources_and_iterators() -> None:
    """Objects that refer to each other, a file and a generator are no problem, and stay what they are."""
    loop: list[Any] = []
    loop.append(loop)
    numbers = (number for number in range(3))
    with open(__file__) as file:
        held = SimpleNamespace(loop=loop, file=file, numbers=numbers, kind=int, module=np)
        snapshot = Snapshot([held])
        next(numbers)
        file.readline()
        held.file = None
        snapshot.restore()
        assert held.file is file and loop[0] is loop and next(numbers) == 1 and file.tell() > 0
