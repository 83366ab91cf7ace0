"""Compress the digits network: int8 after training, half of its channels with fine-tuning, and both. Cross-validated.

    OMP_NUM_THREADS=1 python benchmarks/smaller_models.py [--repeats 6] [--publish]

Each repeat divides the 1,797 images into 5 folds; each fold trains the small ResNet as examples/digits.py does on the other
folds, compresses it, and tests all models on the fold: in each repeat every image is a test image once. Pruned nets are
fine-tuned with distillation from the original. Prints the change of accuracy with its 95 % interval, sizes and latencies, and
whether the bounds hold: the whole interval above a loss of 0.5 points; int8 at most 0.3 of the bytes; pruned at least 1.3 times
faster. ``--publish`` writes them where `nox -s bench` does. Took 6.5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np
import torch
from harness import machine, publish, table
from numpy.typing import NDArray
from scipy.stats import t
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import ConcatDataset, DataLoader, Subset

import hocket
import hocket_tools
from hocket_general import Distillation
from hocket_vision.datasets import digits
from hocket_vision.models import small_resnet

FOLDS, MODELS, MOST_LOST = 5, ("original", "int8-static", "pruned", "pruned, int8-static"), 0.5


@dataclass
class Fold:
    """The models of a fold: their rows, and which of its test images they classify correctly."""

    repeat: int
    images: NDArray[Any]
    rows: list[hocket_tools.Row]
    correct: dict[str, NDArray[Any]]


def divided(repeat: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return the indices of the training and test images of each fold."""
    labels = torch.cat([labels for _, labels in DataLoader(_every_image(), batch_size=500)])
    return list(StratifiedKFold(FOLDS, shuffle=True, random_state=repeat).split(labels, labels))


def _every_image() -> ConcatDataset[Any]:
    return ConcatDataset([digits("train").dataset, digits("test").dataset])


def measured(repeat: int, fold: int, args: argparse.Namespace) -> Fold:
    """Train, compress, and compare on one fold."""
    torch.set_num_threads(1)
    seed = 17 + FOLDS * repeat + fold
    train, test = (Subset(_every_image(), list(indices)) for indices in divided(repeat)[fold])
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:

        def trained(model: torch.nn.Module, duration: str, *algorithms: Any) -> hocket.Trainer:
            trainer = hocket.Trainer(
                model=model,
                loss="cross_entropy",
                train_data=DataLoader(train, 64, shuffle=True, generator=torch.Generator().manual_seed(seed)),
                eval_data={"test": DataLoader(test, len(test))},
                metrics=["accuracy"],
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

        trainer = trained(small_resnet(), args.duration)
        original = trainer.state.model.eval()
        pruning = hocket_tools.ChannelPruning(example=(2, 1, 8, 8), amount=0.5)
        teacher = Distillation(copy.deepcopy(original), temperature=args.temperature, alpha=args.alpha)
        pruned = trained(copy.deepcopy(original).train(), args.fine_tuning, pruning, teacher).state.model.eval()
        calibration = [images for images, _ in islice(trainer.state.train_loader, 16)]
        int8 = [hocket_tools.quantize(model, "int8-static", calibration) for model in (original, pruned)]
        models = dict(zip(MODELS, (original, int8[0], pruned, int8[1]), strict=True))
        others = {name: models[name] for name in MODELS[1:]}
        rows = hocket_tools.compare_compressed(trainer, others, resamples=0, repeats=args.calls, compile=args.compile)
    ((images, labels),) = DataLoader(test, len(test))
    with torch.no_grad():
        correct = {name: (model(images).argmax(1) == labels).numpy() for name, model in models.items()}
    print(f"{repeat} {fold}: {', '.join(f'{row.name} {row.quality:.4f}' for row in rows)}", file=sys.stderr, flush=True)
    return Fold(repeat, np.asarray(test.indices), rows, correct)


def interval(changes: list[NDArray[Any]], images: list[NDArray[Any]]) -> tuple[float, float, float]:
    """Return the mean of a change by test image, and its 95 % interval by Student's t; a fit gives one array of both.

    The standard error is clustered twice, by image and by fit (Cameron, Gelbach and Miller 2011, "Robust Inference with
    Multiway Clustering", equation 2.12), and at least that by either alone. Degrees of freedom: one less than the fits.
    """
    values, image = np.concatenate(changes).astype(float), np.concatenate(images)
    fit = np.repeat(np.arange(len(changes)), [len(each) for each in changes])
    mean = values.mean()

    def variance(cluster: NDArray[Any]) -> float:
        sums = np.bincount(cluster, values - mean)
        count = len(np.unique(cluster))
        return float((sums**2).sum() / len(values) ** 2 * count / (count - 1))

    by_image, by_fit, by_value = variance(image), variance(fit), variance(np.arange(len(values)))
    error = max(by_image, by_fit, by_image + by_fit - by_value) ** 0.5
    half = t.ppf(0.975, len(changes) - 1) * error
    return mean, mean - half, mean + half


def summary(folds: list[Fold], compiled: bool) -> dict[str, Any]:
    """Return figures by model, bounds that do not hold, and the table."""
    heads = ["model", "accuracy, %", "change in points", "95 % interval", "÷ bytes", "times faster", "least to most"]
    values: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(MODELS):
        changes = [100.0 * fold.correct[name] - 100.0 * fold.correct[MODELS[0]] for fold in folds]
        faster = [fold.rows[0].latency_ms / fold.rows[number].latency_ms for fold in folds]
        values[name] = {
            "accuracy": 100 * float(np.concatenate([fold.correct[name] for fold in folds]).mean()),
            "change": interval(changes, [fold.images for fold in folds]),
            "change by fit": [float(change.mean()) for change in changes],
            "changed images": float((np.concatenate(changes) != 0).mean()),
            "bytes": folds[0].rows[number].bytes,
            "size": folds[0].rows[number].bytes / folds[0].rows[0].bytes,
            "faster": faster,
        }
    above = [
        f"{name}: the interval reaches a loss of {-found['change'][1]:.2f} points, not {MOST_LOST} at most"
        for name, found in values.items()
        if found["change"][1] < -MOST_LOST
    ]
    if (size := values["int8-static"]["size"]) > 0.3:
        above.append(f"int8-static: {size:.3f} of the bytes, not 0.3 at most")
    if (faster := statistics.median(values["pruned"]["faster"])) < 1.3:
        above.append(f"pruned: {faster:.2f} times faster, not 1.3 at least")
    rows = [heads] + [
        [
            name,
            f"{found['accuracy']:.2f}",
            "" if name == MODELS[0] else f"{found['change'][0]:+.2f}",
            "" if name == MODELS[0] else f"{found['change'][1]:+.2f} to {found['change'][2]:+.2f}",
            f"{found['size']:.3f}",
            f"{statistics.median(found['faster']):.2f}",
            f"{min(found['faster']):.2f} to {max(found['faster']):.2f}",
        ]
        for name, found in values.items()
    ]
    packages = ("torch", "torchao", "torch-pruning", "scikit-learn")
    about = {**machine(), **{name: version(name) for name in packages}}
    repeats = len({fold.repeat for fold in folds})
    lines = (
        f"{len(folds)} fits: {repeats} times {FOLDS} folds. Latency: {'compiled' if compiled else 'eager'}, batches of "
        f"{folds[0].rows[0].batch} images, 1 thread. Measured on {', '.join(f'{key}: {each}' for key, each in about.items())}."
    )
    return {"about": about, "values": values, "above": above, "table": f"{lines}\n\n{table(rows)}"}


def main() -> int:
    """Print the table; return 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=6, help="divisions into folds")
    parser.add_argument("--duration", default="15ep", help="of the training of the original")
    parser.add_argument("--fine-tuning", default="30ep", help="after channels were removed")
    parser.add_argument("--temperature", type=float, default=4.0, help="of the distillation")
    parser.add_argument("--alpha", type=float, default=0.9, help="weight of the distillation")
    parser.add_argument("--calls", type=int, default=50, help="calls of each model that are timed")
    parser.add_argument("--compile", action="store_true", help="time models compiled by torch.compile")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--publish", action="store_true", help="write figures and table into docs/")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        folds = list(pool.map(measured, *zip(*_fits(args), strict=True)))
    found = summary(folds, args.compile)
    print(found["table"])
    if args.publish:
        publish("Compression", found)
    for each in found["above"]:
        print(f"MISSED: {each}")
    return 1 if found["above"] else 0


def _fits(args: argparse.Namespace) -> Iterator[tuple[int, int, argparse.Namespace]]:
    for repeat in range(args.repeats):
        for fold in range(FOLDS):
            yield repeat, fold, args


if __name__ == "__main__":
    sys.exit(main())
