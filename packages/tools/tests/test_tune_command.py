"""``hocket tune``: what it prints, its exit codes, and that it writes nothing but the plot."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hocket_cli import main

MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        if len(inputs) > 11:
            raise torch.OutOfMemoryError(f"{len(inputs)} samples")
        return inputs * self.w

def data():
    return [(torch.full((8, 1), 2.0), torch.zeros(8, 1))] * 10

def spoilt():
    model = Model()
    torch.nn.init.constant_(next(model.parameters()), float("nan"))
    return model

def flat(outputs, targets):
    return 0 * outputs.sum()

def broken(outputs, targets):
    return (0 * outputs).log().sum() * 0
"""
CONFIGURATION = """
model: tune_project:Model
loss: mse_loss
train_data: tune_project:data
optimizer: sgd(lr=1e-3)
duration: 1ep
callbacks: [lr-monitor]
loggers: [progress, jsonl]
checkpoints: runs/a/checkpoints
run_name: a
seed: 3
"""


@pytest.fixture(autouse=True)
def project(in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("tune_project.py").write_text(MODULE)
    Path("config.yaml").write_text(CONFIGURATION)


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*") if path.is_file() and "__pycache__" not in str(path)}


def test_both_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss is 4 w², of curvature 8."""
    before = files()
    assert main(["tune", "config.yaml", "--limit", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch_size"] == {"largest": 11, "batch": 8, "ranks": 1, "limited": False, "microbatch": None}
    (rate,) = found["learning_rates"]
    assert rate["batch"] == 8
    assert 1 / 3 <= rate["suggestion"] * 8 <= 2 and rate["current"] == 1e-3
    assert len(rate["table"]) > 40 and len(rate["runs"]) >= 3
    assert files() == before


@pytest.mark.long
def test_a_learning_rate_with_overrides_and_a_plot(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    before = files()
    assert (
        main(
            ["tune", "config.yaml", "optimizer.sgd.momentum=0.5", "--lr", "--run-steps", "8", "--plot", "plots/lr.png"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        printed.startswith("learning rate: 0.")
        and " for batches of 8 (now 0.001)\n  because in the range test the loss had fallen" in printed
    )
    assert "batch size" not in printed
    assert files() == {*before, "plots/lr.png"}
    assert Path("plots/lr.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:Where the memory of a CPU runs out")
def test_the_samples_of_an_epoch_limit_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "config.yaml", "limit_train=1", "--batch-size"]) == 0
    assert "8 samples fit in memory at once, which are those of an epoch; larger batches were not tried" in (
        capsys.readouterr().out
    )
    assert main(["tune", "config.yaml", "--batch-size", "--limit", "9"]) == 0
    printed = capsys.readouterr().out
    assert "9 samples fit in memory at once; larger batches were not tried" in printed
    assert "write this one first, and then search with `hocket tune --lr`" in printed


@pytest.mark.long
def test_a_trained_configuration_can_be_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "config.yaml", "device=cpu"]) == 0
    before = files()
    capsys.readouterr()
    assert main(["tune", "config.yaml", "resume=auto", "device=cpu", "--lr", "--run-steps", "0"]) == 0
    printed = capsys.readouterr()
    assert (
        "tune ignores resume: auto, and begins with new weights. Write resume=CHECKPOINT" in printed.err
        and "(now 0.001)" in printed.out
    )
    assert files() == before


def test_a_loss_of_nan_is_no_learning_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "config.yaml", "loss=tune_project:broken", "--lr"]) == 1
    printed = capsys.readouterr().out
    assert (
        "because the loss or the gradients of step 1 are NaN or infinite, although the learning rate was 1e-07"
        in printed
    )
    assert "callbacks=['nan-monitor']" in printed


def test_weights_of_nan_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "config.yaml", "model=tune_project:spoilt", "--lr"]) == 2
    assert "weights with NaN or infinity, in " in capsys.readouterr().err


def test_no_suggestion_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "config.yaml", "loss=tune_project:flat", "--lr", "--steps", "30"]) == 1
    assert capsys.readouterr().out.startswith(
        "no learning rate\n  because the loss did not fall below its noise at any rate"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--plot", "lr.txt"], "--plot lr.txt is not a .png, .pdf, .svg file. Write --plot lr.png"),
        (["--batch-size", "--plot", "lr.png"], "--plot lr.png has no effect without --lr. Add that, or remove --plot"),
        (["--batch-size", "--run-steps", "3"], "--run-steps 3 has no effect without --lr."),
        (["--lr", "--limit", "64"], "--limit 64 has no effect without --batch-size. Add that, or remove --limit"),
        pytest.param(
            ["--lr", "--plot", "config.yaml/lr.png"],
            "config.yaml/lr.png cannot be written: Not a directory",
            marks=pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"),
        ),
        (["--lr", "--steps", "2"], "--steps 2 is too small. Give 20 or more: --steps 100"),
        (["--steps", "2"], "--steps 2 is too small. Give 20 or more: --steps 100"),
        pytest.param(
            ["--lr", "--plot", "there.svg"],
            "--plot there.svg exists. Give another name, or remove that file.",
            marks=pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"),
        ),
        (["--batch-size", "--limit", "0"], "--limit 0 is too small. Give 1 or more: --limit 4096"),
        (["optimizer=", "--lr"], "optimizer"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there.svg").touch()
    assert main(["tune", "config.yaml", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out
