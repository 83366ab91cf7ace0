"""All benchmarks in one run: ``python run.py [--short] [--peers PYTHON --composer PYTHON …]``. Writes JSON and Markdown.

The short form leaves out the peers and fails where a ratio is off by a wide margin. ``--publish`` puts the results where
docs/explanation/benchmarks.md shows them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import algorithms
import by_hand
import checkpoints
import dispatch
import fast_paths
import functional
import memory
import ranks
import start
import steps
import streaming
from harness import DOCS, Worker, machine

MARK = "<!-- What follows is written by `nox -s bench -- --publish`. -->"
EVERYTHING = "every built-in callback, progress + jsonl"
REALISTIC = (
    "bare",
    "progress + jsonl",
    "Lightning, barebones",
    "Lightning, default, logging the loss",
    "Fabric",
    "Accelerate",
    "transformers Trainer, barest",
    "transformers Trainer, default",
    "Composer, barest",
)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--peers", help="the Python of an environment with lightning, accelerate and transformers")
    parser.add_argument("--composer", help="the Python of an environment with mosaicml")
    parser.add_argument("--litdata", help="the Python of an environment with litdata")
    parser.add_argument("--mosaic", help="the Python of an environment with mosaicml-streaming")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write docs/benchmarks.json and the tables of docs/explanation/benchmarks.md",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    repeats = 3 if arguments.short else 7

    begin = time.perf_counter()
    results: dict[str, Any] = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, measure in _sections(arguments, repeats).items():
        results[name] = measure()
        # Each time, whatever becomes of the others.
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    page = _page(results)
    (arguments.out / "results.md").write_text(page)
    print(page)
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)
    if arguments.publish:
        raw = DOCS / "benchmarks.json"
        published = json.loads(raw.read_text()) | results  # some sections are measured by programs of their own
        raw.write_text(json.dumps(published, indent=1) + "\n")
        text, _ = (DOCS / "explanation/benchmarks.md").read_text().split(MARK)
        (DOCS / "explanation/benchmarks.md").write_text(f"{text}{MARK}\n\n{_page(published)}")
    above = [f"{name}: {each}" for name, part in results.items() for each in part.get("above", ())]
    for each in above:
        print(f"ABOVE: {each}")
    return max(_check(results) if arguments.short else 0, 1 if above else 0)


def _sections(arguments: argparse.Namespace, repeats: int) -> dict[str, Callable[[], Any]]:
    """What is measured, in this order."""
    workers = [Worker(sys.executable, "hocket", threads=1)]
    if arguments.peers:
        workers += [Worker(arguments.peers, name, threads=1) for name in ("lightning", "accelerate", "transformers")]
    if arguments.composer:
        workers.append(Worker(arguments.composer, "composer", threads=1))
    few = ("bare", "progress + jsonl", EVERYTHING)
    sections: dict[str, Callable[[], Any]] = {
        "machine": machine,
        "versions": lambda: {worker.name: worker.versions for worker in workers},
        "Step overhead": lambda: steps.overhead(workers, repeats),
        "A step of a millisecond": lambda: steps.millisecond(workers[:1], 2 * repeats, few),
        "Start": lambda: start.run(repeats),
        "Dispatch": lambda: dispatch.run(repeats),
        "Fast paths": lambda: fast_paths.run(repeats),
        "Checkpoints": lambda: checkpoints.run(3, *((1, 5_000) if arguments.short else (14, 50_000))),
    }
    readers = (arguments.litdata, arguments.mosaic, 1 if arguments.short else 3, arguments.short)
    sections["Streams"] = lambda: streaming.run(*readers)
    if arguments.short:
        sections["Functional forms"] = lambda: functional.run(None, repeats, batch=32, side=64)
    else:
        sections |= {
            "Realistic step": lambda: steps.realistic(workers, 4, REALISTIC),
            "Memory": lambda: memory.run(20_000),
            "Algorithms": lambda: algorithms.run(3),
            "Algorithms beside loops by hand": by_hand.run,
            "Functional forms": lambda: functional.run(arguments.composer),
            "Ranks": lambda: ranks.run(60),
        }
    return sections


def _page(results: dict[str, Any]) -> str:
    """Everything that has a table, under its name."""
    about = ", ".join(f"{key}: {value}" for key, value in results["machine"].items())
    versions = {f"{name} {version}" for each in results["versions"].values() for name, version in each.items()}
    lines = [
        f"Measured on {about}; {', '.join(sorted(versions))}. Medians ± half the distance between the quartiles.",
        "",
    ]
    for name, part in results.items():
        if "table" in part:
            lines += [f"## {name}", "", part["table"], ""]
    return "\n".join(lines)


def _check(results: dict[str, Any]) -> int:
    """1 if a ratio within this run is broken by a wide margin, whatever the machine."""
    calls = results["Dispatch"]["us"]
    steps = {name: median(values) for name, values in results["Step overhead"]["ratio"].items()}
    started = {name: median(values) for name, values in results["Start"]["values"].items()}
    saved = {name: median(values) for name, values in results["Checkpoints"]["ratio"].items()}
    raw = started["process start to the end of a first step, hand-written, ms"]
    limits = {
        "a silent event, of pluggy's": (
            median(calls["a silent event"]["hocket"]) / median(calls["a silent event"]["pluggy"]), 0.5,
        ),
        "20 listeners, of pluggy's": (
            median(calls["an event with 20 listeners"]["hocket"]) / median(calls["an event with 20 listeners"]["pluggy"]), 1.0,
        ),
        "a bare step, of the hand-written one": (steps["hocket, bare"], 2.0),
        "a step with everything on, of the hand-written one": (steps[f"hocket, {EVERYTHING}"], 4.0),
        "first step, of the hand-written one's": (
            started["process start to the end of a first step, hocket, ms"] / raw, 2.5,
        ),
        "a checkpoint's save, of DCP's": (saved["a save, of DCP's"], 2.5),
        "training held up by an asynchronous save, of a save": (
            saved["held up by an asynchronous save, of a save"], 0.6,
        ),
        "plugins list, of starting torch": (started["hocket plugins list, 700 further distributions, ms"] / raw, 1.0),
    }  # fmt: skip
    broken = {name: value for name, value in limits.items() if value[0] > value[1]}
    for name, (ratio, limit) in limits.items():
        print(f"{'BROKEN' if name in broken else 'holds'}: {name}: {ratio:.2f}, at most {limit}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
