"""A step without torch's record around it is the same step, and nobody who wants to hear of steps is passed by."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hocket.optim import optimizers
from hocket.state.task import SupervisedTask
from hocket.surgery import Replacement


class Own(SGD):
    """Of the tests, for others use the class too."""


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 3)).square().sum().backward()


def never() -> None:
    raise AssertionError("only LBFGS and its like need a closure")


@pytest.fixture
def records(monkeypatch) -> list[str]:
    """The names of the records that are made."""
    names: list[str] = []
    record = torch.autograd.profiler.record_function

    def record_function(name: str) -> Any:
        names.append(name)
        return record(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", record_function)
    return names


@pytest.mark.parametrize("kind", [SGD, AdamW, torch.optim.Adagrad, torch.optim.Rprop])
def test_it_is_the_same_step(kind, records) -> None:
    results = []
    for own in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            records.clear()
            optimizers.step(optimizer, never) if own else optimizer.step()
            assert len(records) == (not own)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_are_not_recorded_by_a_step(model) -> None:
    optimizer = Own(model.parameters(), lr=0.1)
    backward(model)
    optimizers.step(optimizer, never)
    assert torch.is_grad_enabled() and model.weight.is_leaf and model.weight.grad_fn is None


def _of_it(heard: list[str], optimizer: SGD) -> Iterator[Any]:
    yield optimizer.register_step_pre_hook(lambda *_: heard.append("it"))


def _after_it(heard: list[str], optimizer: SGD) -> Iterator[Any]:
    yield optimizer.register_step_post_hook(lambda *_: heard.append("it"))


def _of_all(heard: list[str], optimizer: SGD) -> Iterator[Any]:
    yield register_optimizer_step_pre_hook(lambda *_: heard.append("it"))


def _after_all(heard: list[str], optimizer: SGD) -> Iterator[Any]:
    yield register_optimizer_step_post_hook(lambda *_: heard.append("it"))


@pytest.mark.parametrize("register", [_of_it, _after_it, _of_all, _after_all])
def test_hooks_are_called(model, register) -> None:
    heard: list[str] = []
    optimizer = Own(model.parameters(), lr=0.1)
    backward(model)
    (handle,) = register(heard, optimizer)
    optimizers.step(optimizer, never)
    assert heard == ["it"]
    handle.remove()
    optimizers.step(optimizer, never)
    assert heard == ["it"]


def test_what_replaces_the_method_is_called(model) -> None:
    """Torch's schedulers do that to count steps, and warn where they see none."""
    optimizer = Own(model.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1)
    backward(model)
    optimizers.step(optimizer, never)
    assert optimizer._opt_called
    schedule.step()


def test_what_is_put_around_the_method_of_a_class_is_called(model, monkeypatch) -> None:
    """functools.wraps copies every mark of what it wraps."""
    heard: list[str] = []
    optimizer = Own(model.parameters(), lr=0.1)
    method = Own.step

    @functools.wraps(method)
    def step(self: Any) -> None:
        heard.append("class")
        method(self)

    monkeypatch.setattr(Own, "step", step)
    backward(model)
    optimizers.step(optimizer, never)
    assert heard == ["class"]


def test_profilers_see_it(model) -> None:
    optimizer = Own(model.parameters(), lr=0.1)
    backward(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizers.step(optimizer, never)
    assert "Optimizer.step#Own.step" in {event.key for event in profile.key_averages()}


def test_a_closure_goes_to_those_that_need_it(model) -> None:
    called = []

    def closure() -> torch.Tensor:
        called.append(True)
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizers.step(torch.optim.LBFGS(model.parameters()), closure)
    assert called


def test_an_instance_follows_the_surgery_that_was_done_before() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer, old = SGD(model.parameters(), lr=0.1), model[2]
    model[2] = nn.Linear(3, 2)
    replaced = [Replacement("2", old, model[2], model)]
    (made,) = optimizers.make_optimizers(optimizer, SupervisedTask(model, None), replaced).values()
    assert made is optimizer
    assert set(made.param_groups[0]["params"]) == set(model.parameters())
