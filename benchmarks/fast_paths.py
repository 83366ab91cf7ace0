"""What each shortcut past torch's own functions saves (8): beside the plain way, in turn, in one process."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import torch
from harness import Series, table
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hocket.basics import fast_paths

Ways = tuple[Callable[[], Any], Callable[[], Any]]


def run(repeats: int) -> dict[str, Any]:
    """Microseconds per call."""
    rows = [["µs per call", "shortcut", "plain", "saves"]]
    values: dict[str, dict[str, list[float]]] = {}
    for case, (shortcut, plain) in _cases().items():
        number = max(1, int(0.02 / min(timeit.repeat(shortcut, number=1, repeat=3))))
        taken = {"shortcut": Series(), "plain": Series()}
        for _ in range(3 * repeats):
            for name, way in (("shortcut", shortcut), ("plain", plain)):
                taken[name].values.append(timeit.timeit(way, number=number) / number * 1e6)
        saved = Series([b - a for a, b in zip(taken["shortcut"].values, taken["plain"].values, strict=True)])
        values[case] = {name: series.values for name, series in taken.items()}
        rows.append([case, str(taken["shortcut"]), str(taken["plain"]), str(saved)])
    return {"us": values, "table": table(rows)}


def _cases() -> dict[str, Ways]:
    cases: dict[str, Ways] = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = kind(model.parameters(), lr=0.0)
        cases[f"step of {kind.__name__}"] = (lambda it=optimizer: fast_paths.step(it)), (lambda it=optimizer: it.step())
    for number, size in ((4, 1000), (60, 10_000)):
        cases |= {f"{name}, {number} × {size:,}": ways for name, ways in _of_gradients(number, size).items()}
    return cases


def _of_gradients(number: int, size: int) -> dict[str, Ways]:
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.randn(size)
    gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.tensor(1.0)
    return {
        "norm": (lambda: fast_paths.norm(gradients, 2.0), lambda: get_total_norm(gradients, 2.0)),
        "scale": (
            lambda: fast_paths.scale(gradients, (10.0 / (norm + 1e-6)).clamp(max=1.0)),
            lambda: clip_grads_with_norm_(parameters, 10.0, norm),
        ),
        "non_finite": (
            lambda: fast_paths.non_finite(gradients),
            lambda: ~torch.isfinite(get_total_norm(gradients, float("inf"))),
        ),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(run(7)["table"])
