"""Data and weights that are named on the command line: errors about them name the word, and what to type."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hocket_cli import main

pytest.importorskip("hocket_general")

MODULE = """
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

INPUTS = torch.arange(64.0).view(16, 4) / 64
LABELS = torch.arange(16) % 3

def net(width=8):
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))

def data(samples=16, **options):
    return DataLoader(TensorDataset(INPUTS[:samples], LABELS[:samples]), 8, **options)

def no_samples():
    return data(0)

def dropped():
    return data(4, drop_last=True)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(())

def stream():
    return DataLoader(Stream(), 8)

def no_batches():
    return []

def empty_batch():
    return [(INPUTS[:0], LABELS[:0])]

def number():
    return 3

def broken():
    raise OSError("the disk is gone")

def nonfinite():
    inputs = INPUTS.clone()
    inputs[3] = float("nan")
    return DataLoader(TensorDataset(inputs, LABELS), 8)
"""
CONFIGURATION = """
model: of_this_test:net
loss: cross_entropy
train_data: of_this_test:data
eval_data: {test: of_this_test:data}
metrics: [accuracy]
optimizer: sgd(lr=0.1)
duration: 1ep
device: cpu
seed: 1
loggers: [jsonl]
"""
Typed = Callable[..., str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("named-data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        patch.delitem(sys.modules, "of_this_test", raising=False)
        Path("of_this_test.py").write_text(MODULE)
        Path("c.yaml").write_text(CONFIGURATION)
        assert main(["train", "c.yaml", "run_name=a"]) == 0
        assert main(["train", "c.yaml", "run_name=b", "model.width=6"]) == 0
    return folder


@pytest.fixture
def typed(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Return a function that types a command, and returns what it printed; ``code`` is the exit code it should have."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "of_this_test", raising=False)

    def call(*words: str, code: int = 2) -> str:
        capsys.readouterr()
        assert main([*words]) == code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return printed.out if code == 0 and "--json" in words else printed.err

    return call


def lines(data: str) -> Iterator[tuple[list[str], str]]:
    """Yield the command lines of all tools that take data, and what an error about the data begins with."""
    for name, key, *options in (
        ("evaluate", "", "--resamples", "100"), ("predict", "", "--to", "p"), ("predict", "", "--out", "p.safetensors"),
        ("export", "eval_data=", "--to", "safetensors"), ("compress", "eval_data=", "--to", "pruned", "--repeats", "1"),
        ("tune", "train_data=", "--lr", "--steps", "20", "--run-steps", "0"),
    ):  # fmt: skip
        word = f"{key}of_this_test:{data}"
        yield [name, "runs/a", word, *options], f"hocket: '{word}': "


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("datta", "has no 'datta'. Did you mean 'data'?"),
        ("number", "is the number 3, and not an iterable of batches"),
        ("broken", "raised OSError: the disk is gone"),
    ],
)
def test_errors_about_data_name_the_word(typed: Typed, data: str, said: str) -> None:
    for words, word in lines(data):
        found = typed(*words)
        assert word in found and said in found and "config.yaml:" not in found


@pytest.mark.parametrize(
    ("data", "given"),
    [
        ("no_samples", "DataLoader over TensorDataset of length 0"),
        ("no_batches", "list of length 0"),
        ("stream", "DataLoader over Stream"),
        ("empty_batch", "list of length 1"),
        ("dropped", "DataLoader over TensorDataset of length 4"),
    ],
)
def test_data_without_samples_are_refused(typed: Typed, data: str, given: str) -> None:
    for words, word in lines(data):
        found = typed(*words)
        assert word in found
        if (words[0], data) == ("tune", "empty_batch"):
            assert "count 0 samples, so nothing was trained. Check train_data" in found
        else:
            assert f" ({given}) yielded no " in found
            assert ("Write `drop_last=false`" if data == "dropped" else "Check what it is made of") in found
    assert (
        not Path("p.safetensors").exists() and not list(Path().glob("p/part-*")) and not Path("runs/a/exports").exists()
    )


def test_options_of_a_search_are_not_blamed_on_the_configuration(typed: Typed) -> None:
    assert "hocket: --steps 3 " in typed("tune", "runs/a", "--lr", "--steps", "3")


@pytest.mark.parametrize("kind", ["int8-static", "pruned"])
def test_compression_needs_training_data_with_samples(typed: Typed, kind: str) -> None:
    found = typed("compress", "runs/a", "--to", kind, "train_data=of_this_test:no_samples")
    assert (
        "'train_data=of_this_test:no_samples': The training data (DataLoader over TensorDataset of length 0)" in found
    )


@pytest.mark.parametrize("command", [["evaluate"], ["predict", "--to", "p"], ["export", "--to", "safetensors"]])
@pytest.mark.parametrize("weights", ["runs/b", "runs/b/weights.safetensors"])
def test_weights_of_another_model(typed: Typed, command: list[str], weights: str) -> None:
    name, *options = command
    found = typed(name, "runs/a", "--weights", weights, *options)
    assert "0.weight ([6, 4], the module has [8, 4])" in found
    assert "They are of the run runs/b: name that run, and override nothing of its model." in found
    Path("runs/b/weights.safetensors").rename("w.safetensors")
    assert "such as config.yaml in the folder of their run." in typed(
        name, "runs/a", "--weights", "w.safetensors", *options
    )


@pytest.mark.parametrize("axis", ["input", "input:one", "x:1", "input:5"])
def test_dynamic_axes_that_do_not_exist(typed: Typed, axis: str) -> None:
    found = typed("export", "runs/a", "--to", "torch-export", "--dynamic", axis)
    assert f"The dynamic axis {axis} is not an input of the model with the number of one of its axes" in found
    assert "shapes input (5, 4). Write --dynamic input:1, or `dynamic: {input: [1]}`" in found


def test_json_has_null_for_numbers_that_are_not_finite(typed: Typed) -> None:
    def parsed(*words: str) -> dict[str, object]:
        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        text = typed(*words, "--json", code=0)
        assert "NaN" not in text and "Infinity" not in text
        return json.loads(text, parse_constant=refuse)  # type: ignore[no-any-return]

    (run,) = parsed("evaluate", "runs/a", "of_this_test:nonfinite", "--resamples", "100")["runs"]  # type: ignore[misc]
    assert run["metrics"]["loss"]["value"] is run["metrics"]["loss"]["low"] is run["values"]["data/loss"] is None  # type: ignore[index]
    rows = parsed("compress", "runs/a", "--to", "pruned", "--repeats", "1")["rows"]
    assert rows[0]["change"] == 0 and rows[0]["change_interval"] == [None, None]  # type: ignore[index]


def test_a_report_with_intervals_that_are_not_finite(typed: Typed) -> None:
    said = typed("evaluate", "runs/a", "of_this_test:nonfinite", "--resamples", "100", "--report", code=0)
    assert "judgement/data: tables in runs/a/media; `hocket report runs/a` shows them." in said
    lines = Path("runs/a/media/metrics.jsonl").read_text().splitlines()
    (metrics,) = (found for line in lines if (found := json.loads(line)).get("table") == "judgement/data/metrics")
    assert metrics["rows"][0][0] == "loss" and metrics["rows"][0][1:] == ["NaN"] * 3
    pytest.importorskip("hocket_report")
    typed("report", "runs/a", code=0)
