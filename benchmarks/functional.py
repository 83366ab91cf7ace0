"""Image methods as functions of a batch, beside Composer's, each in its own process and in turn:
``functional.py --composer PYTHON [NAME ...]``, where PYTHON is that of an environment with mosaicml.

Ends with exit code 1 if a method takes more than its limit of Composer's time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from harness import Series, Worker, median_interval, table
from torch import Tensor, nn

#: Seconds of hocket divided by those of Composer, at most. AugMix and RandAugment: a batch, of one PIL image after the other.
#: On channels-last images BlurPool and Composer's call the same kernels of torch; that is measured without a limit.
LIMITS: dict[str, float | None] = {
    "colout": 1.0, "cutmix": 1.0, "mixup": 1.0, "cutout": 1.0, "augmix": 0.5, "randaugment": 0.5, "blurpool": 0.85,
    "blurpool, channels-last": None,
}  # fmt: skip
REPEATS = 7


def run(
    composer: str | None, repeats: int = REPEATS, batch: int = 256, side: int = 224, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Milliseconds per call on 2 threads, and the ratio of each pair of calls that followed each other."""
    workers = {"hocket": Worker(sys.executable, "hocket_functional", threads=2)}
    try:
        if composer:
            workers["Composer"] = Worker(composer, "composer_functional", threads=2)
        rows = [[f"{batch} × 3 × {side} × {side}, 2 threads", *(f"{name}, ms" for name in workers)]]
        rows[0] += ["÷ Composer", "95 % interval", "at most"] if composer else []
        values: dict[str, Any] = {}
        above: list[str] = []
        for case in (case for case in only or LIMITS if case in workers["hocket"].cases):
            taken = {name: Series() for name in workers}
            for repeat in range(repeats):
                for name, worker in sorted(workers.items(), reverse=bool(repeat % 2)):
                    answer = worker.ask(function=case, batch=batch, side=side)
                    taken[name].values.append(answer["seconds"] * 1e3)
            rows.append([case, *map(str, taken.values())])
            print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
            values[case] = {name: series.values for name, series in taken.items()}
            if composer:
                ratios = [a / b for a, b in zip(taken["hocket"].values, taken["Composer"].values, strict=True)]
                values[case]["ratio"] = ratios
                compared, broken = compare(case, ratios)
                rows[-1] += compared
                above += broken
    finally:
        for worker in workers.values():
            worker.close()
    return {"ms": values, "above": above, "table": table(rows)}


def compare(case: str, ratios: list[float]) -> tuple[list[str], list[str]]:
    """Return the cells of the table about Composer, and a sentence if the ratio is above the limit."""
    ratio, limit = median(ratios), LIMITS[case]
    low, high = median_interval(ratios)
    cells = [f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"]
    if limit is None:
        return [*cells, ""], []
    if ratio <= limit:
        return [*cells, str(limit)], []
    return [*cells, f"{limit}: ABOVE"], [f"{case}: {ratio:.2f} of Composer's time, at most {limit}"]


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


def blurred(
    surgery: Callable[[nn.Module], Any], batch: int, side: int, layout: torch.memory_format = torch.contiguous_format
) -> Callable[[], None]:
    """Forward and backward through a strided convolution and a max pooling, both blurred."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.MaxPool2d(3, 2, 1))
    surgery(model)
    model.to(memory_format=layout)  # type: ignore[call-overload]
    x = images(batch, side).contiguous(memory_format=layout).requires_grad_()

    def call() -> None:
        model(x).sum().backward()

    return call


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="Image methods as functions of a batch, beside Composer's.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(LIMITS)}; default: all")
    parser.add_argument("--composer", help="the Python of an environment with mosaicml")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument(
        "--batch", type=int, default=256, help="fewer images for a quick look, which limits are not about"
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in LIMITS]:
        parser.error(f"{', '.join(map(repr, unknown))}: not a method. There are {', '.join(map(repr, LIMITS))}.")
    found = run(arguments.composer, arguments.repeats, arguments.batch, only=arguments.names)
    print(found["table"], *(f"ABOVE: {each}" for each in found["above"]), sep="\n")
    return 1 if found["above"] else 0


if __name__ == "__main__":
    sys.exit(main())
