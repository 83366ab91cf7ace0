"""Small files of somebody else, valid ones changed by chance: every command ends soon, in little memory, with a sentence."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guarded
import mutations
import numpy as np
import pytest
import safetensors.torch
import torch

import hocket
from hocket_cli import main

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")]
#: Modules that commands import: once, and not in each of the forks.
IMPORTED = (
    "torch._dynamo", "hocket_migration.composer.checkpoint_loading", "hocket_migration.lightning.checkpoint",
    "hocket_report.page",
)  # fmt: skip
#: Parts of the 500 files, and files in each.
PARTS, FILES = 12, 25
#: Printed; to repeat a run: FUZZ_SEED=… nox -s long -- tests/faults/test_fuzz.py
SEED = int(os.environ.get("FUZZ_SEED", time.time_ns() % 100_000))

MODULE = """
import torch
def Net(): return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
def data(size: int = 4): return [(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))] * 4
"""
CONFIG = """\
x-shared: &rate {lr: 1e-2}
model: mine:Net
loss: cross_entropy
train_data: mine:data
eval_data: {test: mine:data}
optimizer: {sgd: *rate}
duration: 2ep
device: cpu
seed: 1
metrics: [accuracy]
callbacks: [lr-monitor]
loggers: [jsonl]
checkpoints: runs/b/checkpoints
run_name: b
"""
SWEEP = """\
config: config.yaml
parameters:
  optimizer.sgd.lr: {loguniform: [1e-4, 1e-1]}
  seed: &seed [1, 2, 3]
metric: test/loss
mode: min
sampler: random
trials: 2
seed: 3
"""
SCRIPT = "import lightning as L\nfrom composer import Trainer\n\ntrainer = L.Trainer(max_epochs=3, devices=1)\n"


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a valid file of each kind."""
    folder = tmp_path_factory.mktemp("valid")
    sys.modules.pop("mine", None)  # of another file's tests, in this process
    (folder / "mine.py").write_text(MODULE)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "sweep.yaml").write_text(SWEEP)
    ended = guarded.call(lambda: main(["train", "config.yaml", "run_name=a", "checkpoints=runs/a/checkpoints"]), folder)
    assert ended.code == 0, ended.output
    (folder / "runs/k").mkdir()  # a run that was killed, whose metrics are read from its rows
    shutil.copy(folder / "runs/a/metrics.jsonl", folder / "runs/k")
    media = folder / "runs/a/media"
    media.mkdir(exist_ok=True)
    row = {"batch": 1, "images": "x", "files": ["1.png"], "bytes": 3}
    table = {"batch": 2, "table": "t", "columns": ["a"], "rows": [["b"], [1.5]]}
    histogram = {"batch": 3, "histogram": "h", "counts": [1, 2], "edges": [0, 1, 2]}
    (media / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in (row, table, histogram)))
    (media / "1.png").write_bytes(b"png")
    entry = {"name": "k", "parameters": {"seed": 1}, "status": "pruned", "value": 0.5, "metrics": {"test/loss": 0.5}}
    (folder / "runs/sweep.json").write_text(json.dumps({"definition": {"metric": "test/loss"}, "trials": [entry]}))
    weights = torch.nn.Linear(3, 2).state_dict()
    lightning = {
        "epoch": 1, "global_step": 8, "pytorch-lightning_version": "2.5.0", "state_dict": weights, "loops": {"fit_loop": {}},
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}], "lr_schedulers": [],
    }  # fmt: skip
    generator = {
        "python": (3, tuple(range(625)), None),
        "numpy": np.random.RandomState(1).get_state(),
        "torch": torch.get_rng_state(),
    }
    state = {"model": weights, "timestamp": {"Timestamp": {"epoch": 1, "batch": 4}}, "run_name": "a", "schedulers": {}}
    torch.save(lightning, folder / "lightning.ckpt")
    torch.save({"state": state, "rng": [generator]}, folder / "composer.pt")
    (folder / "hf").mkdir()
    torch.save(weights, folder / "hf/part.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "part.bin")}
    (folder / "hf/pytorch_model.bin.index.json").write_text(json.dumps(index))
    safetensors.torch.save_file(weights, folder / "weights.safetensors")
    cells = [{"cell_type": "code", "source": SCRIPT.splitlines(keepends=True), "metadata": {}, "outputs": []}]
    (folder / "project").mkdir()
    (folder / "project/train.py").write_text(SCRIPT)
    (folder / "project/train.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    return folder


def lightning(path: str) -> int:
    """Read a checkpoint as the Lightning Trainer does."""
    from hocket_migration.lightning.checkpoint import read

    try:
        read(path, None)
    except hocket.checkpoints.CheckpointError as error:
        print(error)
    return 0


def composer(path: str) -> int:
    """Read a checkpoint as Composer's Trainer does."""
    from hocket_migration.composer.checkpoint_loading import find

    try:
        find(path)
    except (ValueError, FileNotFoundError) as error:
        print(error)
    return 0


Command = list[str] | tuple[Callable[[str], int], str]
RUN: list[Command] = [
    ["runs"], ["runs", "--json"], ["runs", "--sort", "test/loss"], ["report", "runs/a"], ["report", "runs/a", "runs/k"],
]  # fmt: skip


def kinds(valid: Path) -> dict[str, list[Command]]:
    """Return the files that are changed, and the commands that read each."""
    checkpoint = next(each.parent for each in (valid / "runs/a/checkpoints").glob("*/manifest.json"))
    at = checkpoint.relative_to(valid).as_posix()
    tree, *shards = sorted(each.name for each in checkpoint.iterdir() if each.name.startswith("t"))[::-1]
    read: list[Command] = [
        ["checkpoint", "inspect", at], ["checkpoint", "verify", at], ["checkpoint", "diff", at, "weights.safetensors"],
        ["checkpoint", "export", at, "out.safetensors"], ["train", "--from", at, "fast_dev_run=1"],
    ]  # fmt: skip
    migrate: list[Command] = [["migrate", "inspect", "project"], ["migrate", "convert", "project", "--in-place"]]
    train: Command = ["train", "config.yaml", "fast_dev_run=1"]
    again: Command = [
        "train",
        "config.yaml",
        "run_name=a",
        "checkpoints=runs/a/checkpoints",
        "resume=auto",
        "duration=3ep",
    ]

    def export(path: str) -> Command:
        return ["checkpoint", "export", path, "out.safetensors"]

    return {
        "config.yaml": [["plan", "config.yaml"], train, ["train", "config.yaml", "--print-config"]],
        "sweep.yaml": [["sweep", "sweep.yaml", "--prefix", "false"], ["plan", "sweep.yaml"]],
        "runs/a/config.yaml": [["train", "--from", "runs/a", "fast_dev_run=1"], ["report", "runs/a"], again],
        "runs/a/metrics.jsonl": [*RUN, again],
        "runs/k/metrics.jsonl": RUN,
        "runs/a/summary.json": [*RUN, again],
        "runs/a/run.json": [*RUN, again],
        "runs/a/media/metrics.jsonl": [*RUN, again],
        "runs/sweep.json": RUN,
        f"{at}/manifest.json": [*read, again],
        f"{at}/{tree}": [*read, again],
        f"{at}/{shards[0]}": [*read, again],
        "lightning.ckpt": [(lightning, "lightning.ckpt"), export("lightning.ckpt")],
        "composer.pt": [(composer, "composer.pt"), export("composer.pt")],
        "hf/part.bin": [export("hf")],
        "hf/pytorch_model.bin.index.json": [export("hf")],
        "weights.safetensors": [["checkpoint", "diff", "weights.safetensors", at], export("weights.safetensors")],
        "project/train.ipynb": migrate,
        "project/train.py": migrate,
    }


def case(number: int, valid: Path, folder: Path) -> tuple[str, str, Command]:
    """Change a copy of the files, and return the file, how, and the command to run."""
    rng = random.Random(SEED * 1000 + number)
    shutil.copytree(valid, folder, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".output"))
    table = kinds(valid)
    name = [*table][number % len(table)]
    others = [valid / each for each in table if each != name]
    return name, mutations.mutate(folder / name, rng, others), rng.choice(table[name])


def function_of(command: Command) -> Callable[[], Any]:
    return (lambda: main(command)) if isinstance(command, list) else lambda: command[0](command[1])


@pytest.mark.parametrize("part", range(PARTS))
def test_changed_files_end_every_command_soon_and_with_a_sentence(part: int, valid: Path, tmp_path: Path) -> None:
    print(f"FUZZ_SEED={SEED}")
    for module in IMPORTED:
        importlib.import_module(module)
    faults = []
    for number in range(part * FILES, (part + 1) * FILES):
        folder = tmp_path / str(number)
        name, how, command = case(number, valid, folder)
        ended = guarded.call(function_of(command), folder)
        if ended.fault:
            faults.append(f"{number}: {name} ({how}), {command}: {ended.fault}\n{ended.output[-1500:]}")
        else:
            shutil.rmtree(folder)
    assert not faults, f"FUZZ_SEED={SEED}: {len(faults)} of {FILES}\n" + "\n\n".join(faults[:20])


def test_some_of_them_in_processes_of_their_own(valid: Path, tmp_path: Path) -> None:
    print(f"FUZZ_SEED={SEED}")
    for number in range(10_000, 10_012):
        folder = tmp_path / str(number)
        name, how, command = case(number, valid, folder)
        if not isinstance(command, list):
            continue
        program = f"import sys; from hocket_cli import main; sys.exit(main({command!r}))"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, capture_output=True, timeout=60, stdin=subprocess.DEVNULL
        )
        said = f"FUZZ_SEED={SEED}, {number}: {name} ({how}), {command}: {done.stderr.decode(errors='replace')}"
        assert b"Traceback" not in done.stderr and done.returncode in (0, 1, 2), said
