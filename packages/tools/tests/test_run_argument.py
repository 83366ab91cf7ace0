"""What RUN names, and how commands that take it answer: the same for all of them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.checkpoints import read_weights
from hocket_cli import main

MODULE = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset

print("noise of a module")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 16)

    def forward(self, inputs):
        if os.environ.get("INTERRUPT_OF_THIS_TEST"):
            raise KeyboardInterrupt
        return self.layer(inputs)

def data():
    inputs = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.argmax(1) % 16), 8)
"""
CONFIG = """
model: net_of_this_test:Net
loss: cross_entropy
train_data: net_of_this_test:data
eval_data: {test: net_of_this_test:data}
metrics: [accuracy]
optimizer: sgd(lr=0.5)
duration: 2ep
checkpoints: {folder: runs/a/checkpoints, best: [test/loss, max, 1], keep: null}
callbacks: [{journal: {every: 2ba}}]
loggers: []
device: cpu
seed: 1
run_name: a
"""
COMMANDS = {
    "export": ["--to", "safetensors", "--out", "exported"],
    "compress": ["--to", "int8", "--repeats", "1", "--out", "compressed"],
    "evaluate": ["test", "--resamples", "100"],
    "predict": ["test", "--out", "outputs.safetensors"],
    "tune": ["--batch-size", "--limit", "8"],
    "train": ["duration=1ba", "checkpoints=null"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs-of-commands")
    (folder / "net_of_this_test.py").write_text(MODULE)
    (folder / "c.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        assert main(["train", "c.yaml"]) == 0
    (folder / "net_of_this_test.py").rename(folder / "moved.py")  # the run is used with the one in its folder
    yield folder
    sys.modules.pop("net_of_this_test", None)


@pytest.fixture
def typed(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "runs", "runs")
    shutil.copy(trained / "moved.py", "net_of_this_test.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("net_of_this_test", None)

    def call(command: str, place: str, *more: str) -> tuple[int, str, str]:
        if command == "compress":
            pytest.importorskip("torchao")
        if command == "tune":
            pytest.importorskip("hocket_general")
        capsys.readouterr()
        code = main([command, *(["--from"] if command == "train" else []), place, *COMMANDS[command], *more])
        return (code, *capsys.readouterr())

    return call


def empty() -> None:
    Path("empty").mkdir()


def without_weights() -> None:
    shutil.rmtree("runs/a/checkpoints")
    for name in ("weights.safetensors", "run.json"):
        Path("runs/a", name).unlink()


def damaged() -> None:
    Path("runs/a/checkpoints/ep2-ba6/manifest.json").write_text("{")


def no_module() -> None:
    Path("net_of_this_test.py").unlink()


def no_configuration() -> None:
    Path("runs/a/config.yaml").write_text(CONFIG)


@pytest.mark.parametrize(
    ("mistake", "place", "said", "weights_only"),
    [
        (None, "runs/b", "runs/b: It does not exist. Give the folder of a run, such as runs/a, or a checkpoint.", False),
        (
            None, "runs/a/checkpoints/4",
            "It does not exist. Give the folder of a run, such as runs/a, or a checkpoint, such as runs/a/checkpoints/ep2-ba6.",
            False,
        ),
        (empty, "empty", "empty: It has no config.yaml, which `hocket train` writes", False),
        (None, "runs/a/weights.safetensors", "It is a file, and no configuration. Give runs/a,", False),
        (None, "memory://nothing/here", "memory://nothing/here: It has no config.yaml", False),
        (no_configuration, "runs/a", "runs/a/config.yaml was not recorded by a run", False),
        (no_module, "runs/a", "net_of_this_test", False),
        (without_weights, "runs/a", "runs/a: It has neither checkpoints nor weights.safetensors", True),
        (damaged, "runs/a", "Its checkpoint ep2-ba6 is damaged, so the newest is not known: ", True),
        (damaged, "runs/a/checkpoints", "Name the checkpoint, such as runs/a/checkpoints/ep1-ba3.", True),
        (damaged, "runs/a/checkpoints/ep2-ba6", "manifest.json", False),
    ],
)  # fmt: skip
def test_a_mistake_is_named_alike_by_all_commands(
    mistake: Any, place: str, said: str, weights_only: bool, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake is not None:
        mistake()
    if "://" in place:
        pytest.importorskip("fsspec")
    answers = {}
    for command in COMMANDS if not weights_only else ("export", "evaluate", "predict", "compress"):
        code, out, answers[command] = typed(command, place)
        assert code == 2 and "Traceback" not in answers[command], (command, answers[command])
        assert out in ("", "noise of a module\n")
    assert len(set(answers.values())) == 1, answers
    (text,) = set(answers.values())
    assert said in text and text.count("\n") == 1 and text.startswith("hocket: "), text


@pytest.mark.parametrize(
    ("place", "checkpoint"),
    [
        ("runs/a", "ep2-ba6"),
        ("runs/a/checkpoints", "ep2-ba6"),
        ("runs/a/checkpoints/latest", "ep2-ba6"),
        ("runs/a/checkpoints/best", "ep1-ba3"),  # by the highest loss
        ("runs/a/checkpoints/ep1-ba3", "ep1-ba3"),
        ("memory://of-this-test/a", "ep2-ba6"),
        ("memory://of-this-test/a/best", "ep1-ba3"),
        ("memory://of-this-test/a/ep1-ba3", "ep1-ba3"),
    ],
)
def test_a_checkpoint_is_named_by_its_run_its_folder_or_a_url(place: str, checkpoint: str, typed: Any) -> None:
    expected = read_weights(f"runs/a/checkpoints/{checkpoint}")
    trust = []
    if "://" in place:
        fsspec = pytest.importorskip("fsspec")
        fsspec.filesystem("memory").put("runs/a/checkpoints", "/of-this-test/a", recursive=True)
        shutil.rmtree("runs")
        trust = ["--trust"]
        code, _, said = typed("export", place)
        assert code == 2 and "add --trust" in said
    code, _, said = typed("export", place, *trust)
    assert code == 0, said
    exported = read_weights("exported/model.safetensors")
    assert exported.keys() == expected.keys() and all(torch.equal(exported[name], expected[name]) for name in exported)
    code, _, said = typed("predict", place, *trust)
    assert code == 0, said
    inputs = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    outputs = inputs @ expected["layer.weight"].T + expected["layer.bias"]
    torch.testing.assert_close(read_weights("outputs.safetensors")["outputs"], outputs)


@pytest.mark.parametrize("command", ["export", "evaluate", "predict", "compress"])
@pytest.mark.parametrize("which", ["latest", "best"])
def test_weights_outside_of_the_named_run_are_said_and_those_of_another_run_refused(
    command: str, which: str, typed: Any
) -> None:
    shutil.copytree("runs/a", "runs/now")
    shutil.rmtree("runs/now/checkpoints")
    Path("runs/now/weights.safetensors").unlink()
    more = ["--weights", "best"] if which == "best" else []
    read = f"runs/a/checkpoints/{'ep1-ba3' if which == 'best' else 'ep2-ba6'}"
    code, _, said = typed(command, "runs/now", *more)
    assert code == 0 and f"hocket: the weights of runs/now are those of {read}.\n" in said, said
    for written in ("exported", "compressed"):
        shutil.rmtree(written, ignore_errors=True)
    recorded = Path("runs/now/config.yaml")
    identity = json.loads(Path("runs/now/run.json").read_text())["run"]
    recorded.write_text(recorded.read_text().replace(identity, "another"))
    code, _, said = typed(command, "runs/now", *more)
    assert code == 2 and f"{read} is of another run. Write --weights" in said and "Traceback" not in said, said


@pytest.mark.parametrize("command", ["export", "compress"])
@pytest.mark.parametrize("word", ["runs/a", "test"])
def test_commands_of_one_run_name_the_second_word(command: str, word: str, typed: Any) -> None:
    code, _, said = typed(command, "runs/a", word)
    assert code == 2 and f"takes one run, runs/a, and its overrides, and {word} is no override. Remove it" in said


@pytest.mark.parametrize(
    ("command", "out", "said"),
    [
        ("compress", "runs/b", "another"), ("compress", "notes", "or remove it"), ("export", "runs/b", "another"),
        ("export", "runs/a", "files of runs"), ("export", "runs/a/checkpoints", "files of runs"),
        ("export", "runs", "files of runs"), ("export", ".", "the working folder"), ("export", "notes", "or remove it"),
    ],
)  # fmt: skip
def test_nobody_is_advised_to_remove_what_is_valuable(
    command: str, out: str, said: str, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, command, [*COMMANDS[command][:-2], "--out", out, "--overwrite"])
    shutil.copytree("runs/a", "runs/b")
    mark = Path("runs/b/run.json")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "run": "another"}))
    Path("notes/int8").mkdir(parents=True)
    Path("notes/int8/thesis.tex").touch()
    code, _, explained = typed(command, "runs/a")
    assert code == 2 and said in explained and re.search("Give another (folder|path)", explained)
    assert ("remove" in explained) == (out == "notes"), explained


DATA = """
import torch

def texts():
    return ["a", "b"]

def dicts():
    return [{"q": torch.ones(8, 32)}] * 3

def without_labels():
    return [torch.ones(8, 32)] * 3"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("eval_data.test=data_of_this_test:dicts", "inputs=NAME"),
        ("train_data=data_of_this_test:texts", "Convert samples in the data set"),
        ("eval_data.test=data_of_this_test:without_labels", "has nothing at 1"),
    ],
)
def test_data_that_do_not_suit_compression_are_explained_in_one_paragraph(
    change: str, said: str, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "compress", ["--to", "int8-static, int8", "--repeats", "1"])
    Path("data_of_this_test.py").write_text(DATA)
    code, _, explained = typed("compress", "runs/a", change)
    assert code == 2 and said in explained and "Traceback" not in explained, explained


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_alone_on_stdout(command: str, typed: Any) -> None:
    code, out, said = typed(command, "runs/a", "--json")
    assert code == 0, said
    assert isinstance(json.loads(out), dict) and "noise of a module" in said
    if command == "compress":
        from hocket_tools import quantize

        (folder,) = json.loads(out)["models"].values()
        model = torch.nn.Sequential(torch.nn.Linear(32, 16))
        model[0].weight.data, model[0].bias.data = read_weights("runs/a/checkpoints/ep2-ba6").values()
        module, inputs = torch.export.load(Path(folder, "model.pt2")).module(), torch.randn(5, 32)
        torch.testing.assert_close(module(inputs=inputs), quantize(model, "int8")(inputs))
        assert (module(inputs=inputs) - model(inputs)).abs().max() > 0


def test_verification_as_json(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "train", ["checkpoints=null", "--verify", "--json"])
    code, out, said = typed("train", "runs/a")
    assert code == 0, said
    found = json.loads(out)
    assert found["verification"]["same"] is True and found["weights"] == "runs/a-2/weights.safetensors"
    assert found["metrics"].keys() >= {"test/loss", "test/accuracy"}
    code, out, said = typed("train", "runs/a", "optimizer.sgd.lr=0.4")
    assert code == 1 and "is not repeated" in said
    found = json.loads(out)
    assert found["verification"]["same"] is False and found["verification"]["what"] == "lr"


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "train"])  # which leaves a run
def test_control_c_leaves_nothing_half_written(
    command: str, typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def files() -> set[str]:
        return {str(each) for each in Path().rglob("*") if "__pycache__" not in each.parts}

    before = files()
    monkeypatch.setenv("INTERRUPT_OF_THIS_TEST", "1")
    with pytest.raises(KeyboardInterrupt):
        typed(command, "runs/a")
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "hocket: interrupted." and "Traceback" not in said
    assert files() == before


def test_progress_shows_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hocket_tools import progress

    clock = iter([10.0, 20.0, 20.05, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Progress() as line:
        line.step("batches", 4)  # at 10
        line.step("batches", 4)
        line.step("batches", 4)  # too soon
        line.step("batches", 4)
    parts = capsys.readouterr().err.split("\r\033[K")
    assert parts == [
        "",
        "batches 1 of 4, 0:00:00 left",
        "batches 2 of 4, 0:00:10 left",
        "batches 4 of 4, 0:00:00 left",
        "",
    ]
