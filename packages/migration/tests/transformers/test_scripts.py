"""Scripts that `hocket migrate convert` moved give the losses and weights of the originals."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch

from hocket_migration.command import add_arguments, run

SCRIPTS = Path(__file__).parent / "scripts"


def _run(
    script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> tuple[dict, dict]:
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", [str(script), str(folder)])
    capsys.readouterr()
    runpy.run_path(str(script), run_name="__main__")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return json.loads(printed[-1]), torch.load(folder / "weights.pt")


def _convert(script: Path, folder: Path) -> Path:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["convert", str(script), "--out", str(folder)])) == 0
    return folder / script.name


def _numbers(row: dict) -> dict:
    return {name: value for name, value in row.items() if "runtime" not in name and "per_second" not in name}


@pytest.mark.filterwarnings("ignore:.* does not use num_items_in_batch")
@pytest.mark.parametrize("name", ["classification", "language_modelling"])
def test_a_converted_script_gives_the_losses_of_the_original(name, tmp_path, monkeypatch, capsys):
    script = SCRIPTS / f"{name}.py"
    moved = _convert(script, tmp_path / "moved")
    assert "hocket_migration" in moved.read_text() and "hocket_migration" not in script.read_text()
    original, weights = _run(script, tmp_path / "a", monkeypatch, capsys)
    ours, our_weights = _run(moved, tmp_path / "b", monkeypatch, capsys)
    assert sum("loss" in row for row in original["log"]) >= 10
    assert len(ours["log"]) == len(original["log"])
    for mine, theirs in zip(ours["log"], original["log"], strict=True):
        assert mine.keys() == theirs.keys()
        assert {name: type(value) for name, value in mine.items()} == {n: type(value) for n, value in theirs.items()}
        assert _numbers(mine) == pytest.approx(_numbers(theirs), abs=1e-5)
    assert ours["train_loss"] == pytest.approx(original["train_loss"], abs=1e-6)
    for key, value in weights.items():
        assert torch.allclose(our_weights[key], value, atol=1e-5), key


@pytest.mark.long
def test_a_converted_script_gives_the_losses_of_the_original_on_two_ranks(tmp_path):
    moved = _convert(SCRIPTS / "ranks.py", tmp_path / "moved")
    launchers = {
        SCRIPTS / "ranks.py": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
        moved: ["-m", "hocket", "launch", "-n", "2"],
    }
    logs = []
    for script, launcher in launchers.items():
        folder = tmp_path / f"out{len(logs)}"
        folder.mkdir()
        command = [sys.executable, *launcher, str(script), str(folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        logs.append([_numbers(row) for row in json.loads((folder / "log.json").read_text())])
    assert len(logs[0]) == len(logs[1]) > 5
    for theirs, ours in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
