"""``hocket compress`` on a run of ``hocket train``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hocket_cli import main

pytest.importorskip("torchao", minversion="0.18")
pytest.importorskip("torch_pruning")

MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def net():
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


def nothing():
    return [(torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.long))]


def data():
    images = torch.randn(64, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(images, images.flatten(1)[:, :4].argmax(1)), batch_size=16)
"""
CONFIG = """
model: digits_of_this_test:net
loss: cross_entropy
train_data: digits_of_this_test:data
eval_data: {test: digits_of_this_test:data}
metrics: [accuracy]
optimizer: adamw(lr=0.02)
duration: 3ep
algorithms: [{ema: {half_life: 2ba}}]
device: cpu
seed: 1
run_name: a
"""


@pytest.fixture
def run(in_an_empty_folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("digits_of_this_test.py").write_text(MODULE)
    Path("config.yaml").write_text(CONFIG)
    assert main(["train", "config.yaml"]) == 0
    printed = capsys.readouterr().out
    yield float(next(line.split()[1] for line in printed.splitlines() if line.startswith("test/accuracy")))
    sys.modules.pop("digits_of_this_test", None)


@pytest.mark.long
def test_a_table_of_a_run(run, capsys):
    assert (
        main(["compress", "runs/a", "--to", "int8-static,pruned", "--amount", "0.25", "--repeats", "2", "--json"]) == 0
    )
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    original, int8, pruned = found["rows"]
    assert [original["name"], int8["name"], pruned["name"]] == ["original", "int8-static", "pruned 25%"]
    assert original["quality"] == pytest.approx(run, abs=1e-4)  # of the averages, as the run evaluated them
    assert int8["bytes"] < original["bytes"] and pruned["bytes"] < original["bytes"]
    assert int8["quality_interval"][0] <= int8["quality"] <= int8["quality_interval"][1]
    assert "pruned is not fine-tuned" in printed.err
    images, labels = sys.modules["digits_of_this_test"].data().dataset.tensors
    for row in (int8, pruned):
        folder = Path(found["models"][row["name"]])
        assert folder.parent == Path("runs/a/compressed").absolute()
        assert json.loads((folder / "export.json").read_text())["origin"]["compression"] == folder.name
        outputs = torch.export.load(folder / "model.pt2").module()(input=images)  # without the code of the model
        assert (outputs.argmax(1) == labels).float().mean().item() == pytest.approx(row["quality"], abs=1e-6)

    assert main(["train", "config.yaml", "run_name=b", "duration=1ep"]) == 0
    written = ["--to", "int8-static", "--repeats", "1", "--out"]
    assert main(["compress", "runs/b", *written, "here"]) == main(["compress", "runs/b", *written, "here"]) == 0
    capsys.readouterr()
    assert main(["compress", "runs/a", *written, "here"]) == 2
    assert "here/int8-static has an export of run b" in capsys.readouterr().err
    assert main(["compress", "runs/a", *written, "here", "--overwrite"]) == 0
    assert "it is replaced" in capsys.readouterr().err

    weights = load_file("runs/a/weights.safetensors")
    weights["4.bias"][0] = torch.inf
    save_file(weights, "broken.safetensors")
    for arguments, said in (
        (["--to", "pruned", "--weights", "broken.safetensors"], "NaN or infinity, in 4.bias"),
        (["--to", "pruned", "eval_data={test: digits_of_this_test:nothing}"], "yielded no sample"),
        (["--to", "int8-static,int3"], "'int3'"),
        (["--to", "int4"], "no multiple of 16"),
        (["--to", "int8-static", "--metric", "test/f1"], "Give one of test/accuracy"),
        (["--to", "int8-static", "--calibration", "0"], "--calibration 16"),
    ):
        assert main(["compress", "runs/a", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error


def test_no_run(in_an_empty_folder, capsys):
    assert main(["compress", "runs/b", "--to", "int8"]) == 2
    assert "runs/b: It does not exist" in capsys.readouterr().err
