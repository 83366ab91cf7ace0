"""Every algorithm beside the best loop by hand that does the same: ``by_hand.py [NAME ...] [--seconds 20] [--cpu-time]``.

Ends with exit code 1 if an algorithm's step takes more than 1.1 of the loop's.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from hand_loops import BEDS, CASES, WITHOUT, Bed, Case, Surgery, sgd
from harness import Series, median_interval, table
from torch import nn

import hocket
from hocket.plugins import registry

#: An algorithm's step divided by the loop's, at most.
LIMIT = 1.1
#: Steps of a repeat, of which the first ones do not count; repeats at least, and seconds for an algorithm at most.
STEPS, WARMUP, REPEATS, SECONDS = 14, 3, 6, 20.0


def names() -> list[str]:
    """Return all algorithms of the packages of this repository, from the registry."""
    return sorted(entry.name for entry in registry.entries("algorithms") if entry.dist.startswith("hocket-algorithms-"))


@dataclass
class Comparison:
    """Seconds of a step, by repeat: of the algorithm, and of each loop by hand."""

    own: list[float]
    loops: list[list[float]]

    @property
    def best(self) -> list[float]:
        """Of the loop with the smallest median."""
        return min(self.loops, key=median)

    @property
    def ratios(self) -> list[float]:
        """The algorithm's step divided by that of the best loop, in the same repeat."""
        return [a / b for a, b in zip(self.own, self.best, strict=True)]

    def settled(self, limit: float) -> bool:
        """Whether the interval of the median lies on one side of the limit."""
        low, high = median_interval(self.ratios)
        return high <= limit or low > limit


def run(only: Sequence[str] = (), seconds: float = SECONDS) -> dict[str, Any]:
    """Compare each algorithm until the verdict is clear, for some seconds at most; in one process with one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    head = [
        "32 × 3 × 32 × 32 or 8 × 64 tokens, 1 thread",
        "÷ by hand",
        "95 % interval",
        "by hand, ms",
        f"at most {LIMIT}",
    ]
    rows, ratios, above = [head], {}, []
    for name in only or names():
        if name in WITHOUT:
            rows.append([name, "", "", "", f"not compared: {WITHOUT[name]}"])
            continue
        case = CASES[name]
        found = compare(name, case, BEDS[case.bed], seconds)
        ratios[name] = found.ratios
        low, high = median_interval(found.ratios)
        ratio, verdict = median(found.ratios), "holds"
        if ratio > LIMIT:
            verdict = "ABOVE" if low > LIMIT else "ABOVE, by less than the noise"
            above.append(f"{name}: {ratio:.2f} of the loop by hand, at most {LIMIT}")
        shown = f"{name} *" if isinstance(case, Surgery) else name
        hand = Series([value * 1e3 for value in found.best])
        rows.append([shown, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", str(hand), verdict])
        print(
            f"{name}: {ratio:.3f} ({low:.3f} to {high:.3f}) in {len(ratios[name])} repeats", file=sys.stderr, flush=True
        )
    note = (
        "\\* The loop by hand trains the model that the functional form makes: the ratio is the framework's overhead."
    )
    return {"ratio": ratios, "above": above, "table": f"{table(rows)}\n\n{note}"}


def compare(name: str, case: Case, bed: Bed, seconds: float, steps: int = STEPS) -> Comparison:
    """Take turns, each time in another order, until the interval of the ratio is on one side of the limit."""
    model, batches = bed.model(), bed.batches(steps)
    loops = [lambda model, watch: fit(name, case, bed, model, watch), *case.loops]
    taken: list[list[float]] = [[] for _ in loops]

    def turn() -> None:
        order = range(len(loops)) if len(taken[0]) % 2 else reversed(range(len(loops)))
        for which in order:
            watch = Watch(batches)
            loops[which](copy.deepcopy(model), watch)
            taken[which].append(watch.step)

    turn()  # warms up
    for each in taken:
        each.clear()
    found, end = Comparison(taken[0], taken[1:]), time.perf_counter() + seconds
    while len(found.own) < REPEATS or not (found.settled(LIMIT) or time.perf_counter() > end):
        turn()
    return found


class Watch:
    """Batches in memory; notes when each is asked for."""

    #: Or ``time.process_time``.
    clock: Callable[[], float] = time.perf_counter

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.times: list[float] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.times.append(type(self).clock())
            yield batch

    @property
    def step(self) -> float:
        """Seconds of the median step of the first epoch, the first ones omitted. (SWA passes the batches again at the end.)"""
        return median(later - earlier for earlier, later in pairwise(self.times[WARMUP : len(self)]))


def fit(name: str, case: Case, bed: Bed, model: nn.Module, batches: Any) -> nn.Module:
    """Train with the algorithm, and return the model."""
    trainer = hocket.Trainer(
        model=model,
        loss=bed.loss,
        train_data=batches,
        **({} if bed.loss is None else {"inputs": 0, "targets": 1}),
        optimizer=sgd,
        duration="1ep",
        algorithms=[{name: case.settings()}],
        precision=bed.precision,
        seed=0,
        device="cpu",
    )
    trainer.fit()
    return trainer.state.model


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names())}; default: all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for an algorithm whose verdict is unclear")
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure CPU time, on a machine that does other work too"
    )
    arguments = parser.parse_args()
    if arguments.cpu_time:
        Watch.clock = time.process_time
    if unknown := sorted({*arguments.names} - {*names()}):
        parser.error(f"{', '.join(unknown)}: not an algorithm. There are {', '.join(names())}.")
    found = run(arguments.names, arguments.seconds)
    print(found["table"], *(f"ABOVE: {each}" for each in found["above"]), sep="\n")
    return 1 if found["above"] else 0


if __name__ == "__main__":
    sys.exit(main())
