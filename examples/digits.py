"""scikit-learn's handwritten digits, trained plain and with algorithms picked by name from the installed packages.

    python examples/digits.py [--duration 15ep] [--folder runs]

Prints the plan, a progress bar for each run and a table of what every plug-in gained and cost, and writes `report.html`, which
compares the runs. `digits.yaml` is the second run as a configuration for `hocket train`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torchmetrics.classification import MulticlassAccuracy

import hocket
import hocket_report
from hocket_vision.datasets import digits
from hocket_vision.models import small_resnet

#: Names; where the defaults are not for so short a run, a configuration.
ALGORITHMS = ["blurpool", "label-smoothing", {"ema": {"half_life": "30ba"}}]


@dataclass
class Run:
    """What the table says about a run."""

    name: str
    result: hocket.Result
    seconds: float


def train(name: str, algorithms: list[Any], duration: str, folder: str) -> Run:
    """One run with everything but the algorithms the same."""
    torch.manual_seed(17)
    trainer = hocket.Trainer(
        model=small_resnet(),
        loss=torch.nn.functional.cross_entropy,
        train_data=digits("train", batch_size=64),
        eval_data={"test": digits("test", batch_size=360)},
        metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
        optimizer="adamw(lr=0.005, weight_decay=0.05)",
        schedule="cosine(warmup=0.1dur)",
        duration=duration,
        algorithms=algorithms,
        callbacks=["lr-monitor", "speed-monitor", "memory-monitor", {"sample-visualizer": {"on": "test"}}],
        loggers=["progress", "jsonl"],
        seed=17,
        run_name=name,
        folder=folder,
        checkpoints=hocket.Checkpoints(
            f"{folder}/{name}/checkpoints", best=("test/accuracy", "max", 1), overwrite=True
        ),
        profile="5ba after 10ba",
        profile_plugins=True,
    )
    print(f"\n--- {name}\n{trainer.plan()}\n")
    start = time.perf_counter()
    with trainer:
        result = trainer.fit()
    return Run(name, result, time.perf_counter() - start)


def report(runs: list[Run]) -> None:
    """The table of runs, and what each plug-in cost."""
    table = Table("run", "test accuracy", "wall time", "samples/s", title="\nhandwritten digits, 360 held out")
    for run in runs:
        now = run.result.timestamp
        accuracy = run.result.metrics["test/accuracy"]
        table.add_row(run.name, f"{accuracy:.2%}", f"{run.seconds:.1f} s", f"{now.sample / now.seconds:,.0f}")
    costs = Table("run", "plug-in", "cost per batch", "share of the run", title="\nwhat each plug-in cost")
    for run in runs:
        by_plugin: dict[str, float] = {}
        for (plugin, _), cost in run.result.costs.items():
            by_plugin[plugin] = by_plugin.get(plugin, 0.0) + cost.seconds
        for plugin, seconds in by_plugin.items():
            per_batch = seconds / run.result.timestamp.batch
            costs.add_row(run.name, plugin, f"{per_batch * 1e6:,.0f} µs", f"{seconds / run.seconds:.1%}")
    console = Console(width=100)
    console.print(table)
    console.print(costs)
    folders = [run.result.run_folder for run in runs]
    console.print(f"logged to {', '.join(map(str, folders))}; compared in {hocket_report.write(folders)}")


def main() -> None:
    """Both runs and the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--duration", default="15ep")
    parser.add_argument("--folder", default="runs")
    args = parser.parse_args()
    report(
        [
            train("digits-plain", [], args.duration, args.folder),
            train("digits-algorithms", ALGORITHMS, args.duration, args.folder),
        ]
    )


if __name__ == "__main__":
    main()
