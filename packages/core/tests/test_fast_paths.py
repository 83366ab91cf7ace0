"""Each shortcut gives the bits of the plain way, and where torch lacks the names that it rests on, the plain way is taken."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hocket.basics import fast_paths
from hocket.basics.dtensors import non_finite
from hocket.optim import clipping

#: The module, whose name torch.optim does not keep.
OPTIMIZER = importlib.import_module("torch.optim.optimizer")
PRIVATE = ["_foreach_norm", "_foreach_mul_", "_amp_foreach_non_finite_check_and_unscale_"]


def tensors(number: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(7, 3, generator=generator) for _ in range(number)]


def another_torch() -> ModuleType:
    """The module as a torch would import it that is as it is now."""
    spec = importlib.util.spec_from_file_location("another_fast_paths", fast_paths.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Later:
    """A torch in which the private names are others."""

    def __getattr__(self, name: str) -> Any:
        if name in PRIVATE:
            raise AttributeError(name)
        return getattr(torch, name)


@pytest.fixture(params=["as it is", "without private names"])
def torch_there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "as it is":
        monkeypatch.setattr(fast_paths, "torch", Later())
    return request.param


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_norm(torch_there: str, order: float) -> None:
    found = fast_paths.norm(tensors(), order)
    assert torch.equal(found, get_total_norm(tensors(), order))


def test_scale_clips_as_torch_does(torch_there: str) -> None:
    parameters = [nn.Parameter(torch.zeros(7, 3)) for _ in range(5)]
    for parameter, gradient in zip(parameters, tensors(), strict=True):
        parameter.grad = gradient
    found = tensors()
    norm = torch.tensor(9.0)
    fast_paths.scale(found, (0.5 / (norm + 1e-6)).clamp(max=1.0))
    clip_grads_with_norm_(parameters, 0.5, norm)
    assert all(torch.equal(mine, parameter.grad) for mine, parameter in zip(found, parameters, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf")])
def test_non_finite(torch_there: str, bad: float | None) -> None:
    given = tensors()
    if bad is not None:
        given[3][2, 1] = bad
    found = fast_paths.non_finite(given)
    if torch_there == "as it is":
        assert found is not None and bool(found) is (bad is not None)
    else:
        assert found is None  # and others look at norms
    assert torch.equal(given[0], tensors()[0])


def test_clipping_and_the_guard_work_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for torch_is_another in (False, True):
        parameters = [nn.Parameter(torch.zeros(7, 3)) for _ in range(5)]
        for parameter, gradient in zip(parameters, tensors(), strict=True):
            parameter.grad = gradient
        if torch_is_another:
            monkeypatch.setattr(fast_paths, "torch", Later())
        norm = clipping.clip_gradients(parameters, "norm", 0.1)
        assert not non_finite([parameter.grad for parameter in parameters])  # type: ignore[misc]
        results.append([norm, *(parameter.grad for parameter in parameters)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.autograd, "_profiler_enabled"),
        (OPTIMIZER, "_global_optimizer_pre_hooks"),
        (OPTIMIZER, "_global_optimizer_post_hooks"),
        (torch.optim.Optimizer, "profile_hook_step"),
    ],
)
def test_step_where_torch_lacks_a_name(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones(1, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    with monkeypatch.context() as patched:
        patched.delattr(owner, name)
        module = another_torch()
    module.step(optimizer)
    assert called == ["hook"] and torch.equal(model.weight, before - 0.5)


def test_step_where_torch_puts_something_else_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of another code is not taken for the one that is known."""
    called: list[str] = []
    plain = torch.optim.SGD.step

    def record(self: torch.optim.SGD) -> None:
        called.append("record")
        plain(self)

    record.__wrapped__ = lambda self: called.append("inside")  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.optim.SGD, "step", record)
    fast_paths.step(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert called == ["record"]
