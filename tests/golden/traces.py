"""Losses and weights of many kinds of runs after every step, to compare two versions of the code on one machine, bit by bit.

python tests/golden/traces.py before.json      # with the one version
python tests/golden/traces.py after.json       # with the other
python tests/golden/traces.py before.json after.json
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_testkit.ranks import run_ranks


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 3),
    )


def blocks() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))


def samples(number: int = 28) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(number, 1, 8, 8, generator=generator), torch.arange(number) % 3)


def named_losses(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"error": F.cross_entropy(outputs, targets), "size": outputs.square().mean() / 8}


def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = targets != 1
    return (F.cross_entropy(outputs, targets, reduction="none") * kept).sum() / kept.sum().clamp(min=1), kept.sum()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def schedulers(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


def two(model: nn.Module) -> Any:
    first, *others = model.parameters()
    return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


def overflow(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e30)


PLAN = {"1": "colwise", "3": "rowwise"}
TENSOR = {"tensor-parallel": {"tensor": 2, "plan": PLAN}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "adamw": (1, {"optimizer": "adamw(lr=0.01)"}),
    "lbfgs": (1, {"optimizer": "lbfgs(lr=0.1, max_iter=3)", "duration": "4ba"}),
    "two optimizers": (1, {"optimizer": two}),
    "scheduled": (1, {"schedule": "cosine(warmup=0.2dur)"}),
    "torch's scheduler": (1, {"schedule": schedulers}),
    "clipped": (1, {"clip_gradients": 0.5}),
    "skipped": (1, {"optimizer": overflow, "nonfinite": "skip"}),
    "evaluated": (1, {"eval_data": True, "eval_every": "2ba"}),
    "named losses": (1, {"loss": named_losses, "microbatch": 3}),
    "weighted": (1, {"loss": weighted, "microbatch": 3}),
    "summed": (1, {"loss": summed, "loss_reduction": "sum", "microbatch": 3, "optimizer": "sgd(lr=0.01)"}),
    **{f"microbatch {size}": (1, {"microbatch": size}) for size in (1, 3, 8)},
    **{precision: (1, {"precision": precision}) for precision in ("bf16", "bf16-true", "fp16", "fp16-true", "fp64")},
    **{
        name: (1, {"algorithms": [options], "microbatch": microbatch})
        for microbatch in (None, 3)
        for name, options in {
            f"ema {microbatch}": {"ema": {"half_life": "2ba"}},
            f"sam {microbatch}": {"sam": {}},
            f"label smoothing {microbatch}": {"label-smoothing": {}},
            f"gradient clipping {microbatch}": {"gradient-clipping": {"kind": "adaptive", "threshold": 0.1}},
            f"colout {microbatch}": {"colout": {}},
            f"blurpool {microbatch}": {"blurpool": {}},
        }.items()
    },
    "all callbacks": (
        1,
        {"callbacks": ["lr-monitor", "nan-monitor", "optimizer-monitor", "speed-monitor"], "loggers": ["jsonl"]},
    ),
    "sam, clipped, fp16": (1, {"algorithms": ["sam"], "clip_gradients": 0.5, "precision": "fp16"}),
    "ddp": (2, {"strategy": "ddp"}),
    "ddp, microbatches": (2, {"strategy": "ddp", "microbatch": 2, "loss": weighted, "clip_gradients": 0.5}),
    "ddp, fp16, sam": (2, {"strategy": "ddp", "precision": "fp16", "algorithms": ["sam"]}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp, microbatches": (2, {"strategy": "fsdp", "microbatch": 2, "clip_gradients": 0.5, "algorithms": ["ema"]}),
    "local sgd": (2, {"strategy": {"local-sgd": {"every": 2}}, "global_batch": None}),
    "tensor parallel": (2, {"strategy": TENSOR, "model": blocks}),
}


class Trace(hocket.Callback):
    """Writes down the loss and a hash of the weights after every batch."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def batch_end(self, state: hocket.State) -> None:
        digest = hashlib.sha256()
        for tensor in state.task.state_dict().values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        assert state.loss is not None
        self.rows.append([float(state.loss).hex(), digest.hexdigest()[:16]])


def trace(options: dict[str, Any], folder: Path) -> list[Any]:
    torch.manual_seed(5)
    options = dict(options)
    model = options.pop("model", network)()
    if options.get("optimizer") is two:
        options["optimizer"] = two(model)
    if options.pop("eval_data", None):
        options["eval_data"] = DataLoader(samples(10), 4)
    kept = Trace()
    arguments = {
        "loss": F.cross_entropy, "train_data": DataLoader(samples(), 8, shuffle=True), "global_batch": 8, "device": "cpu",
        "optimizer": "sgd(lr=0.1, momentum=0.9)", "duration": "2ep", "seed": 3, "folder": folder, "checkpoints": None,
    }  # fmt: skip
    arguments |= {**options, "callbacks": [*options.get("callbacks", ()), kept]}
    if arguments["global_batch"] is None or "strategy" not in options:
        del arguments["global_batch"]
    result = hocket.Trainer(model=model, **arguments).fit()
    metrics = {name: float(value).hex() for name, value in result.metrics.items() if not name.startswith("time/")}
    return [kept.rows, metrics]


def write(path: Path) -> None:
    found = {}
    for name, (world_size, options) in CASES.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")

            def run(rank: int, options: dict[str, Any] = options, folder: str = folder) -> list[Any]:
                return trace(options, Path(folder))

            print(name, file=sys.stderr)
            found[name] = run_ranks(run, world_size, timeout=120)
    path.write_text(json.dumps(found, indent=1) + "\n")


def compare(one: Path, other: Path) -> int:
    before, after = (json.loads(path.read_text()) for path in (one, other))
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in different:
        print(f"{name}:\n  {before.get(name)}\n  {after.get(name)}"[:1000])
    print(f"{len(before)} and {len(after)} runs, {len(different)} different")
    return bool(different)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    paths = [Path(each) for each in sys.argv[1:]]
    sys.exit(compare(*paths) if len(paths) == 2 else write(*paths))
