"""What stands in W&B's offline files, and what happens when its server does not answer."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch

from hocket_loggers import WandbLogger
from hocket_testkit import LoggerConformance

wandb = pytest.importorskip("wandb")

from wandb.proto import wandb_internal_pb2  # noqa: E402

from hocket_loggers.wandb import _records, read  # noqa: E402

POSITION = {"batch", "epoch", "sample", "token", "seconds"}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_X_DISABLE_STATS": "true",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module", autouse=True)
def _end_the_service():
    yield
    wandb.teardown()


def rows(folder, killed=0):
    """The rows of all files, once W&B's service has ended all but `killed` of them."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    for file in files[killed:]:
        for _ in range(300):
            if any(
                wandb_internal_pb2.Record.FromString(record).HasField("exit") for record in _records(file.read_bytes())
            ):
                break
            time.sleep(0.1)
    return [row for file in files for row in read(file)]


def values(folder, name, killed=0):
    return [(row["batch"], row[name]) for row in rows(folder, killed) if name in row]


def test_every_record(state_in, tmp_path):
    logger = WandbLogger("digits")
    logger.log_hyperparameters(
        state_in(tmp_path), {"lr": 0.1, "algorithms": {"ema": {"half_life": "50ba"}}, "none": None}
    )
    logger.log_metrics(state_in(tmp_path, 1), {"train/loss": 0.1 + 0.2, "epoch": 5})
    logger.log_metrics(state_in(tmp_path, 2), {"train/loss": math.nan})
    images = [torch.randint(256, (3, 4, 5), dtype=torch.uint8), torch.rand(3, 4, 5).bfloat16()]
    logger.log_images(state_in(tmp_path, 2), "samples", images)
    logger.log_table(state_in(tmp_path, 2), "generated", ["text", "score"], [["a|b", 0.5], [None, 1]])
    logger.log_text(state_in(tmp_path, 2), "texts/first", "# A <title>")
    logger.log_histogram(state_in(tmp_path, 2), "weights", [1, 0, 2.5], [-1.0, 0.0, 0.5, 2.0])
    (tmp_path / "file.txt").write_text("content")
    logger.log_artifact(state_in(tmp_path, 2), "a file", tmp_path / "file.txt")
    logger.close(state_in(tmp_path, 2))

    assert values(tmp_path, "metric/epoch") == [(1, 5)]
    (first, (step, value)) = values(tmp_path, "train/loss")
    assert first == (1, 0.1 + 0.2) and step == 2 and math.isnan(value)
    assert [row["sample"] for row in rows(tmp_path)] == [4 * row["batch"] for row in rows(tmp_path)]
    (written,) = tmp_path.glob("wandb/offline-run-*/files")
    found = {name: value for row in rows(tmp_path) for name, value in row.items()}
    from PIL import Image

    with Image.open(written / found["samples/filenames"][0]) as image:
        assert image.size == (5, 4) and image.convert("RGB").getpixel((0, 0)) == tuple(images[0][:, 0, 0].tolist())
    table = json.loads((written / found["generated/path"]).read_text())
    assert table["columns"] == ["text", "score"] and table["data"] == [["a|b", 0.5], [None, 1]]
    assert "<pre># A &lt;title&gt;</pre>" in (written / found["texts/first/path"]).read_text()
    assert found["weights/values"] == [1, 0, 2.5] and found["weights/bins"] == [-1, 0, 0.5, 2]
    raw = next(tmp_path.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    assert b"half_life" in raw and b"50ba" in raw and b"a-file" in raw


def test_a_killed_run_continues_and_has_each_value_once(killed_and_resumed, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # of this process, which would outlive the one that is killed
    losses = killed_and_resumed({"wandb": {"mode": "offline"}}, patience=20.0)  # W&B writes the file every 15 s
    assert values(tmp_path / "run", "train/loss", killed=1) == losses
    files = [file.name for file in (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")]
    assert len(files) == 2 and len(set(files)) == 1, "two files of one run, which wandb sync joins"


def test_the_process_ends_though_the_server_never_answers(silent_server, run_against):
    """A socket that accepts and is silent: the run is complete in jsonl, and the process ends."""
    environment = {"WANDB_MODE": "online", "WANDB_BASE_URL": silent_server, "WANDB_API_KEY": "0" * 40}
    run_against({"wandb": {}}, environment)


_UNCLOSED = """
import torch, hocket
data = [(torch.ones(4, 4), torch.ones(4, 1))] * 20
trainer = hocket.Trainer(
    model=torch.nn.Linear(4, 1), loss="mse", optimizer="sgd(lr=0.1)", train_data=data, log_every="5ba", device="cpu",
    loggers=[{"wandb": {"mode": "offline"}}], run_name="unclosed",
)
trainer.fit("1ep")
"""


def test_a_script_that_does_not_close_the_trainer_ends_without_a_warning(tmp_path):
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("WANDB")
    }  # not this process's service
    done = subprocess.run(
        [sys.executable, "-c", _UNCLOSED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=own,
    )
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert [row["batch"] for row in rows(tmp_path / "runs" / "unclosed") if "train/loss" in row] == [5, 10, 15, 20]


class TestWandb(LoggerConformance):
    def make(self):
        return WandbLogger()

    def written(self, logger, folder):
        found = {}
        for row in rows(folder):
            for name in row.keys() - POSITION:
                if not name.startswith("_"):
                    found.setdefault(name, []).append(float(row[name]))
        return found
