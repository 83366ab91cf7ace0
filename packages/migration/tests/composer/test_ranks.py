"""A Composer project in two processes, with shards and checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchmetrics")
pytest.importorskip("hocket_general")
pytest.importorskip("hocket_vision")
pytest.importorskip("hocket_strategies")

PROJECT = """
import json, sys, torch
from hocket_migration.composer import Evaluator, Trainer
from hocket_migration.composer.algorithms import EMA, BlurPool
from hocket_migration.composer.loggers import InMemoryLogger
from hocket_migration.composer.models import ComposerClassifier
from hocket_migration.composer.optim import DecoupledAdamW, LinearScheduler
from hocket_migration.composer.utils import dist

parallelism, duration = json.loads(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, stride=2), torch.nn.Flatten()]
model = ComposerClassifier(torch.nn.Sequential(*layers, torch.nn.Linear(64, 4)), num_classes=4)
data = torch.utils.data.TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(0, 4, (32,)))
size = 8 // dist.get_world_size()
loader = lambda: torch.utils.data.DataLoader(data, batch_size=size, sampler=dist.get_sampler(data))
logger = InMemoryLogger()
trainer = Trainer(
    model=model, train_dataloader=loader(), eval_dataloader=Evaluator(label="test", dataloader=loader()),
    max_duration=duration, optimizers=DecoupledAdamW(model.parameters(), lr=0.01),
    schedulers=LinearScheduler(t_max="3ep"), algorithms=[BlurPool(), EMA(half_life="2ba")], device="cpu", seed=1,
    progress_bar=False, loggers=[logger], save_folder="checkpoints", run_name="a", autoresume=True,
    parallelism_config=parallelism,
)
trainer.fit()
if dist.get_global_rank() == 0:
    print(json.dumps([logger.data["loss/train/total"][-1][1], *map(float, trainer.state.eval_metric_values.values())]))
"""


def run(folder: Path, parallelism: object, durations: list[str], *command: str) -> list[float]:
    """Train to each of the durations in turn, in processes that continue the checkpoints; return the last results."""
    folder.mkdir()
    (folder / "project.py").write_text(PROJECT, encoding="utf-8")
    for duration in durations:
        done = subprocess.run(
            [sys.executable, *command, "project.py", json.dumps(parallelism), duration],
            cwd=folder, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.long
def test_two_ranks_with_shards_equal_one(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", None, ["3ep"])
    fsdp = {"fsdp": {"sharding_strategy": "FULL_SHARD"}}
    both = run(tmp_path / "both", fsdp, ["2ep", "3ep"], "-m", "hocket", "launch", "-n", "2")
    assert both == pytest.approx(alone, rel=1e-4)
