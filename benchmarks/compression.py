"""Compress the digits network over several seeds: int8 after training, and half of its channels with fine-tuning.

    python benchmarks/compression.py [--seeds 5] [--compile] [--json FILE]

Each seed trains the small ResNet of examples/digits.py, quantizes it to int8 with calibration, and removes half of the channels
and fine-tunes the rest with distillation from the original. Prints the changes in test accuracy with their 95 % interval over
seeds (Student's t), the sizes and the latencies on one thread, and whether the bounds of issue 38 hold: at most 0.5 points
lost; int8 at most 0.3 of the bytes; pruned at least 1.3 times faster.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
from typing import Any

import torch
from scipy.stats import t
from torchmetrics.classification import MulticlassAccuracy

import hocket
import hocket_tools
from hocket_general import Distillation
from hocket_vision.datasets import digits
from hocket_vision.models import small_resnet


def trained(model: torch.nn.Module, seed: int, duration: str, algorithms: list[Any], folder: str) -> hocket.Trainer:
    """Train as examples/digits.py does."""
    trainer = hocket.Trainer(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        train_data=digits("train", batch_size=64),
        eval_data={"test": digits("test", batch_size=360)},
        metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
        optimizer="adamw(lr=0.005, weight_decay=0.05)",
        schedule="cosine(warmup=0.1dur)",
        duration=duration,
        eval_every=None,
        algorithms=algorithms,
        seed=seed,
        device="cpu",
        folder=folder,
    )
    trainer.fit()
    return trainer


def compressed(seed: int, args: argparse.Namespace, folder: str) -> list[hocket_tools.Row]:
    """Train, compress in both ways, and compare."""
    torch.manual_seed(seed)
    trainer = trained(small_resnet(), seed, args.duration, [], folder)
    model = trainer.state.model
    calibration = [images for (images, _), _ in zip(digits("train", batch_size=64), range(16), strict=False)]
    int8 = hocket_tools.quantize(model, "int8-static", calibration)
    pruning = hocket_tools.ChannelPruning(example=(2, 1, 8, 8), amount=0.5)
    teacher = Distillation(copy.deepcopy(model).eval())
    pruned = trained(copy.deepcopy(model), seed, args.fine_tuning, [pruning, teacher], folder).state.model.eval()
    return hocket_tools.compare_compressed(
        trainer, {"int8-static": int8, "pruned": pruned}, resamples=0, repeats=args.repeats, compile=args.compile
    )


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean of a value by seed, and its 95 % interval by Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, float("nan"), float("nan")
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def main() -> int:
    """Print the table; return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--duration", default="15ep", help="of the training of the original")
    parser.add_argument("--fine-tuning", default="30ep", help="after channels were removed")
    parser.add_argument("--repeats", type=int, default=50, help="calls of each model that are timed")
    parser.add_argument("--compile", action="store_true", help="time models compiled by torch.compile")
    parser.add_argument("--json", metavar="FILE", help="also write the rows of all seeds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(17, 17 + args.seeds):
            tables.append(compressed(seed, args, folder))
            print(f"seed {seed}: {', '.join(f'{row.name} {row.quality:.4f}' for row in tables[-1])}", file=sys.stderr)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([[vars_of(row) for row in rows] for rows in tables], file, indent=1)
    print(f"{'':12} accuracy   change in points [95 %]     size ÷   times faster [least, most]")
    results = {}
    for number, original in enumerate(tables[0]):
        rows = [table[number] for table in tables]
        change = interval([100 * row.change for row in rows])
        size = rows[0].bytes / tables[0][0].bytes
        faster = [table[0].latency_ms / row.latency_ms for table, row in zip(tables, rows, strict=True)]
        results[original.name] = change, size, statistics.median(faster)
        print(
            f"{original.name:12} {100 * statistics.fmean(row.quality for row in rows):7.2f}    "
            f"{change[0]:+.2f} [{change[1]:+.2f}, {change[2]:+.2f}]".ljust(48)
            + f"{size:.3f}    {statistics.median(faster):.2f} [{min(faster):.2f}, {max(faster):.2f}]"
        )
    kept = {
        "int8 loses at most 0.5 points": results["int8-static"][0][0] >= -0.5,
        "int8 is at most 0.3 of the size": results["int8-static"][1] <= 0.3,
        "pruned loses at most 0.5 points": results["pruned"][0][0] >= -0.5,
        "pruned is at least 1.3 times faster": results["pruned"][2] >= 1.3,
    }
    print(f"{args.seeds} seeds, torch {torch.__version__}, 1 thread, {'compiled' if args.compile else 'eager'}")
    for bound, holds in kept.items():
        print(f"{'holds' if holds else 'FAILS'}: {bound}")
    return 0 if all(kept.values()) else 1


def vars_of(row: hocket_tools.Row) -> dict[str, Any]:
    """Return a row as plain data."""
    from hocket_tools.compression.comparison import as_json

    return as_json([row])[0]


if __name__ == "__main__":
    sys.exit(main())
