"""Image methods as functions of a batch, beside Composer's, each in its own process and in turn (9)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import Series, Worker, table
from torch import Tensor, nn

#: Seconds of hocket divided by those of Composer, at most. AugMix and RandAugment: a batch, of one PIL image after the other.
LIMITS = {
    "colout": 1.0, "cutmix": 1.0, "mixup": 1.0, "cutout": 1.0, "augmix": 0.5, "randaugment": 0.5, "blurpool": 0.85,
}  # fmt: skip


def run(composer: str | None, repeats: int, batch: int = 256, side: int = 224) -> dict[str, Any]:
    """Milliseconds per call on 2 threads, and the ratio of each pair of calls that followed each other."""
    workers = {"hocket": Worker(sys.executable, "hocket_functional", threads=2)}
    if composer:
        workers["Composer"] = Worker(composer, "composer_functional", threads=2)
    try:
        rows = [[f"{batch} × 3 × {side} × {side}, 2 threads", *(f"{name}, ms" for name in workers), "ratio", "at most"]]
        values: dict[str, Any] = {}
        for case in (case for case in LIMITS if case in workers["hocket"].cases):
            taken = {name: Series() for name in workers}
            for _ in range(repeats):
                for name, worker in workers.items():
                    answer = worker.ask(function=case, batch=batch, side=side)
                    taken[name].values.append(answer["seconds"] * 1e3)
            own = taken["hocket"].values
            ratio = Series([a / b for a, b in zip(own, taken[list(workers)[-1]].values, strict=True)])
            values[case] = {name: series.values for name, series in taken.items()} | {"ratio": ratio.values}
            compared = [str(ratio), str(LIMITS[case])] if composer else ["", ""]
            rows.append([case, *map(str, taken.values()), *compared])
    finally:
        for worker in workers.values():
            worker.close()
    return {"ms": values, "table": table(rows)}


# --- for the contenders


def images(batch: int, side: int) -> Tensor:
    """Floating-point images in [0, 1], smooth as photographs are."""
    coarse = torch.rand(batch, 3, side // 8, side // 8, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")


def integers(batch: int, side: int) -> Tensor:
    """The same as uint8."""
    return (images(batch, side) * 255).to(torch.uint8)


def labels(batch: int) -> Tensor:
    """Class indices."""
    return torch.arange(batch) % 1000


def blurred(surgery: Callable[[nn.Module], Any], batch: int, side: int) -> Callable[[], None]:
    """Forward and backward through a strided convolution and a max pooling, both blurred."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.MaxPool2d(3, 2, 1))
    surgery(model)
    x = images(batch, side).requires_grad_()

    def call() -> None:
        model(x).sum().backward()

    return call


if __name__ == "__main__":
    print(run(sys.argv[1] if len(sys.argv) > 1 else None, 5)["table"])
