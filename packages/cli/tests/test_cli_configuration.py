"""Configurations of the command line: objects by import path, overrides, and what every typo ends in."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hocket import plugins
from hocket_cli import main

MINE = """
import dataclasses
import hocket
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Net(nn.Module):
    def __init__(self, width: int = 4, norm=None, scale=1.0) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width} is too small")
        self.layers = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
    def forward(self, inputs):
        return self.layers(inputs)

def never():
    raise RuntimeError("a model was made")

class Wide(Net):
    def __init__(self, factor: int, **others):
        super().__init__(**others)

@dataclasses.dataclass
class Sizes:
    width: int = 3

class Sized(Net):
    def __init__(self, sizes: Sizes, make: type[nn.Module] = nn.ReLU):
        super().__init__(sizes.width)
        self.extra = make()

class Squares(Dataset):
    def __init__(self, count: int = 16, seed: int = 0):
        self.inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].square().sum(0, keepdim=True)

def loader(count: int = 16, batch_size: int = 8):
    return DataLoader(Squares(count), batch_size)

def splits(split, count: int = 16):
    return loader(count if split == "train" else 8)

def collate(samples):
    return torch.utils.data.default_collate(samples)

def loss(outputs, targets):
    return (outputs - targets).square().mean()

def huber(outputs, targets, delta: float):
    return nn.functional.huber_loss(outputs, targets, delta=delta)

def crash(outputs, targets):
    return outputs.no_such_attribute

def sgd(parameters, lr: float):
    return torch.optim.SGD(parameters, lr=lr)

def half(clock):
    return 0.5

class Both(hocket.data.DataModule):
    def __init__(self, count: int = 16, batch_size: int = 8, split: float = 0.5, flawed: bool = False):
        self.count, self.batch_size, self.split, self.flawed = count, batch_size, split, flawed
    def prepare(self):
        with open("prepared", "a") as file:
            file.write(".")
    def setup(self):
        if self.count > 99:
            raise ValueError(f"count={self.count} is too large")
        self.parts = torch.utils.data.random_split(Squares(self.count), [self.split, 1 - self.split])
    def train(self):
        return self.parts[0] if self.flawed else DataLoader(self.parts[0], self.batch_size, shuffle=True)
    def eval(self):
        return {"test": DataLoader(self.parts[1], self.batch_size)}

class WithPrediction(Both):
    def predict(self):
        return DataLoader(Squares(6), 4)

ready = Both(batch_size=4)

class Largest:
    def __init__(self, scale=1.0):
        self.scale = scale
        self.reset()
    def reset(self):
        self.value = 0.0
    def update(self, outputs, targets):
        self.value = max(self.value, self.scale * (outputs - targets).abs().max().item())
    def compute(self):
        return self.value
"""
SMALL = """\
model: mine:Net
loss: mine:loss
train_data: mine:loader
optimizer: sgd(lr=0.1)
duration: 1ep
device: cpu
seed: 1
run_name: r
"""
#: Every key whose value is no object in Python alone, with nested ones of all kinds.
FULL = """\
model:
  mine:Net:
    width: 8
loss:
  mine:huber:
    delta: 1.0
loss_reduction: mean
train_data:
  torch.utils.data:DataLoader:
    dataset:
      mine:Squares:
        count: 16
    batch_size: 8
    shuffle: true
    collate_fn: mine:collate
eval_data:
  test:
    data:
      class_path: torch.utils.data.DataLoader
      init_args:
        dataset:
          class_path: mine.Squares
          init_args:
            count: 8
            seed: 1
        batch_size: 4
    every: 2ba
metrics:
  largest:
    mine:Largest:
      scale: 2.0
train_metrics:
  largest: mine:Largest
optimizer:
  adamw:
    lr: 1e-2
    betas: [0.9, 0.99]
    amsgrad: false
schedule:
  cosine:
    warmup: 0.1dur
schedule_every: 1ba
duration: 2ep
callbacks:
- lr-monitor
- early-stopping:
    monitor: test/loss
    patience: 5
    mode: min
loggers:
- jsonl
strategy: single
precision: bf16
device: cpu
actions: default
microbatch: 4
eval_every: 1ep
log_every: 5ba
clip_gradients: [norm, 1.0]
nonfinite: raise
seed: 3
deterministic: false
compile: false
checkpoints:
  folder: stored
  every: 1ep
  keep: 2
  best: [test/loss, min, 1]
  asynchronous: false
  on_error: stop
run_name: r
folder: runs
plugins: false
profile_plugins: false
profile: 1ba after 1ba
limit_train: 3
limit_eval: 3
limit_predict: 3
detect_anomaly: false
sanity_eval: 1
"""

Hocket = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hocket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hocket:
    """Run the command in a folder with mine.py, and return its exit code and what it printed on stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(MINE)

    def run(text: str, command: str, *arguments: str) -> tuple[int, str, str]:
        Path("c.yaml").write_text(text)
        return main([command, "c.yaml", *arguments]), *capsys.readouterr()

    return run


def changed(**values: object) -> str:
    """SMALL with other values."""
    return yaml.safe_dump({**yaml.safe_load(SMALL), **values})


# --- what works


def test_train_resume_evaluate_predict(hocket: Hocket) -> None:
    text = FULL + "resume: auto\n"
    code, _, failed = hocket(text, "train")
    assert code == 0, failed
    assert hocket(text, "train", "duration=3ep")[0] == 0
    assert Path("stored/ep3-ba6").is_dir()
    weights = "runs/r/weights.safetensors"
    assert load_file(weights)["layers.0.weight"].shape == (8, 3)
    code, evaluated, failed = hocket(text, "evaluate", "--weights", weights, "limit_eval=1")
    assert code == 0 and "test/largest" in evaluated, failed
    assert hocket(text, "predict", "--weights", weights, "--out", "o.safetensors")[0] == 0
    assert load_file("o.safetensors")["outputs"].shape == (8, 1)
    code, _, said = hocket(text, "predict", "--weights", weights, "--out", "o.csv")
    assert code == 2 and "--out o.csv does not end in .safetensors" in said and "Write --out o.safetensors" in said
    assert not Path("o.csv").exists()
    code, _, said = hocket(text, "predict", "--weights", weights, "--out", weights)
    assert (
        code == 2
        and "is not a file of outputs of an earlier prediction" in said
        and "outputs" not in load_file(weights)
    )
    assert hocket(text, "predict", "--weights", weights, "--out", "o.safetensors")[0] == 0
    assert hocket(text, "plan", "duration=4ep")[0] == 0


def test_plugins_of_one_name_are_overridden_by_the_name_in_the_plan(hocket: Hocket) -> None:
    stopping = [{"early-stopping": {"monitor": "test/loss", "mode": "min", "patience": each}} for each in (3, 5)]
    text = changed(callbacks=["lr-monitor", *stopping], eval_data={"test": "mine:loader"})
    assert "early-stopping-2" in hocket(text, "plan")[1]

    def patience(*changes: str) -> list[int]:
        printed = yaml.safe_load(hocket(text, "plan", "--print-config", *changes)[1])
        return [each["early-stopping"]["patience"] for each in printed["callbacks"][1:]]

    code, _, said = hocket(text, "plan", "callbacks.early-stopping.patience=7")
    assert code == 2 and "callbacks has 'early-stopping' 2 times" in said
    assert "callbacks.1.early-stopping.… for the first, and callbacks.early-stopping-2.… for the second" in said
    assert patience("callbacks.early-stopping-2.patience=7") == [3, 7]
    assert patience("callbacks.2.early-stopping.patience=7") == [3, 7]
    assert patience("callbacks.1.early-stopping.patience=7") == [7, 5]
    named = text.replace("- early-stopping:", "- hocket/early-stopping:", 1)
    said = hocket(named, "plan", "callbacks.hocket/early-stopping.patience=7")[2]
    assert "callbacks has 'early-stopping' 2" in said and "callbacks.early-stopping-2.…" in said
    named = changed(callbacks=[{"hocket/early-stopping": stopping[0]["early-stopping"]}], eval_data=None)
    assert hocket(named, "plan", "callbacks.hocket/early-stopping.patience=7")[0] == 0
    code, _, said = hocket(text, "plan", "callbacks.early-stopping=early-stopping(monitor=train/loss)")
    assert code == 2 and "Write callbacks.1=… for the first, and callbacks.early-stopping-2=…" in said
    assert "-2" not in hocket(SMALL, "plan", "inputs=[0, 1]", "inputs.x=2")[2]
    code, _, said = hocket(text, "plan", "callbacks.early-stopping-3.patience=7")
    assert code == 2 and "callbacks has no item 'early-stopping-3'. Did you mean 'early-stopping-2'?" in said


def test_a_name_with_dots_or_spaces_is_in_quotes(hocket: Hocket) -> None:
    text = changed(eval_data={"a b.c=é": "mine:loader", "1": "mine:loader"}, metrics={"max e.%": "mae"})

    def read(*changes: str) -> Any:
        return yaml.safe_load(hocket(text, "plan", "--print-config", *changes)[1])

    found = read('eval_data."a b.c=é".count=4', 'eval_data."1".count=6', 'metrics."max e.%"=mse', 'run_name="a=b.c"')
    assert found["eval_data"] == {"a b.c=é": {"mine:loader": {"count": 4}}, "1": {"mine:loader": {"count": 6}}}
    assert found["metrics"] == {"max e.%": "mse"} and found["run_name"] == "a=b.c"
    code, _, said = hocket(text, "plan", "eval_data.a b.c=é.count=4")
    assert code == 2 and "eval_data has no set 'a b'; known: 1, \"a b.c=é\"." in said
    assert "To add one, write 'eval_data.\"a b\"=…'." in said
    assert "Did you mean '\"a b.c=é\"'?" in hocket(text, "plan", 'eval_data."a b.c=e".count=4')[2]
    assert hocket(text, "train", "run_name=a b")[0] == 0
    weights = "--weights", "runs/a b/weights.safetensors"
    assert "Write --out 'o u.safetensors';" in hocket(text, "predict", *weights, "--out", "o u.csv")[2]
    only = changed(eval_data={"a b.c=é": "mine:loader"})
    said = hocket(only, "predict", *weights, "--set", "a", "--out", "o.safetensors")[2]
    assert "Write --set 'a b.c=é'." in said
    said = hocket(text, "evaluate", "--weights", "runs/a b")[2]
    assert "the weights of runs/a b are those of runs/a b/weights.safetensors." in said
    code, _, said = hocket(text, "sweep", "seed=1,2", "--metric", "1/loss", "--mode", "min", "--name", "a/b")
    assert code == 2 and "The sweep's name, a/b, is not that of one folder. Write --name" in said


def test_unranked_checkpoints_are_evaluated_as_the_message_says(hocket: Hocket) -> None:
    text = changed(eval_data={"val": "mine:loader"})
    arguments = "evaluate", "--weights", "best"
    assert hocket(text, "train", "checkpoints=ck 3 é")[0] == 0
    code, _, said = hocket(text, *arguments, "checkpoints=ck 3 é")
    assert code == 2 and "The checkpoints in ck 3 é are not ranked. To rank them, write" in said
    (override,) = shlex.split(said.split("`")[1])
    code, best, said = hocket(text, *arguments, override)
    assert code == 0 and "val/loss" in best, said
    assert hocket(text, "train", "checkpoints=never", "eval_data=null", "run_name=b")[0] == 0
    assert "They follow no evaluation" in hocket(text, *arguments, "checkpoints=never")[2]


def with_data(data: object, **values: object) -> str:
    """SMALL with a data module."""
    text = yaml.safe_load(changed(data=data, **values))
    del text["train_data"]
    return yaml.safe_dump(text)


def test_train_resume_evaluate_predict_with_a_data_module(hocket: Hocket) -> None:
    text = with_data({"mine:Both": {"batch_size": 4}}, checkpoints="stored", resume="auto")
    code, planned, failed = hocket(text, "plan")
    assert code == 0 and "Net" in planned, failed
    assert not Path("prepared").exists()
    assert hocket(text, "train")[0] == 0
    assert Path("stored/ep1-ba2").is_dir()
    code, trained, failed = hocket(text, "train", "duration=3ep")
    assert code == 0 and Path("stored/ep3-ba6").is_dir(), failed
    whole = with_data({"mine:Both": {"batch_size": 4}}, run_name="whole", duration="3ep")
    code, at_once, _ = hocket(whole, "train")
    measured = [[line for line in each.splitlines() if line.startswith("test/loss")] for each in (trained, at_once)]
    assert measured[0] == measured[1] != []
    Path("prepared").unlink()
    weights = "runs/r/weights.safetensors"
    code, evaluated, failed = hocket(text, "evaluate", "--weights", weights)
    assert code == 0 and evaluated.splitlines() == measured[0], failed
    assert Path("prepared").read_text() == "."
    assert hocket(text, "predict", "--weights", weights, "--out", "o.safetensors")[0] == 0
    assert load_file("o.safetensors")["outputs"].shape == (8, 1)
    predicting = with_data("mine:WithPrediction")
    again = ("predict", "--weights", weights, "--out", "o.safetensors", "--overwrite")
    assert hocket(predicting, *again)[0] == 0
    assert load_file("o.safetensors")["outputs"].shape == (6, 1)
    assert hocket(predicting, *again, "--set", "test")[0] == 0
    assert load_file("o.safetensors")["outputs"].shape == (8, 1)
    code, _, said = hocket(predicting, "predict", "--weights", weights, "--set", "val", "--out", "o.safetensors")
    assert code == 2 and "There is no evaluation set 'val'; the configuration has test." in said


@pytest.mark.parametrize(
    "data",
    ["mine:ready", {"mine:Both": {"batch_size": 4}}, {"mine:Both": [16, 4]},
     {"class_path": "mine.Both", "init_args": {"batch_size": 4}}],
)  # fmt: skip
def test_the_forms_of_a_data_module_mean_the_same(data: object, hocket: Hocket) -> None:
    code, _, failed = hocket(with_data(data, checkpoints="stored"), "train")
    assert code == 0 and Path("stored/ep1-ba2").is_dir(), failed


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        ({"mine:Both": {"batch_sise": 4}}, [], ["c.yaml:3", "no argument 'batch_sise'", "Did you mean 'batch_size'?"]),
        ({"mine:Both": {"batch_size": "four"}}, [], ["c.yaml:3", "`data.batch_size: four` is text", "an integer"]),
        ({"mine:Bath": {}}, [], ["c.yaml:2", "mine has no 'Bath'", "Did you mean 'Both'"]),
        (
            {"class_path": "mine.Both", "init_arg": {}},
            [],
            ["c.yaml:3", "'init_arg' stands beside class_path", "init_args"],
        ),
        ("mine:Both", ["data.batch_sise=4"], ["'data.batch_sise=4'", "no argument 'batch_sise'"]),
        ("mine:Both", ["data.split=half"], ["'data.split=half'", "is text", "a number"]),
        ("mine:Both", ["train_data=mine:loader"], ["train_data and data are both given"]),
        (
            {"mine:Both": {"flawed": True}},
            [],
            ["c.yaml:2", "is a data set (Subset)", "{torch.utils.data:DataLoader: {"],
        ),
        ({"mine:Both": {"count": 100}}, [], ["count=100 is too large"]),
    ],
)
def test_errors_of_a_data_module(data: object, changes: list[str], words: list[str], hocket: Hocket) -> None:
    try:
        code, _, said = hocket(with_data(data), "train", *changes)
    except ValueError as error:  # of the user's own code, with its traceback
        code, said = 2, str(error)
    assert code == 2
    assert [each for each in words if each not in said] == [], said
    assert said.strip().count("\n") == 0


@pytest.mark.parametrize("given", [{"small": 3}, {"small": "abc"}])
def test_the_arguments_of_a_data_set_by_name_are_a_mapping(given: object, hocket: Hocket) -> None:
    plugins.register("datasets", "small", lambda split, count=16: None)
    try:
        code, _, said = hocket(with_data(given), "train")
    finally:
        plugins.unregister("datasets", "small")
    assert code == 2
    assert "c.yaml:2: The arguments of small are" in said and "Write a mapping" in said, said


def test_a_data_module_is_overridden_and_printed(hocket: Hocket) -> None:
    text = with_data("mine:Both", checkpoints="stored")
    code, printed, _ = hocket(text, "train", "data.batch_size=2", "data.count=8", "--print-config")
    assert code == 0 and yaml.safe_load(printed)["data"] == {"mine:Both": {"batch_size": 2, "count": 8}}
    assert "hocket.data.DataModule" in printed
    code, _, failed = hocket(printed, "train")
    assert code == 0 and Path("stored/ep1-ba2").is_dir(), failed


@pytest.mark.parametrize(
    "model",
    ["mine:Net", {"mine:Net": {"width": 4}}, {"mine:Net": None}, {"class_path": "mine.Net", "init_args": {"width": 4}},
     {"class_path": "mine:Net"}, {"mine:Net": [4]}, "mine.Net"],
)  # fmt: skip
def test_the_forms_of_an_object_mean_the_same(model: object, hocket: Hocket) -> None:
    sys.path.insert(0, str(Path.cwd()))
    code, _, failed = hocket(changed(model=model), "train")
    assert code == 0, failed
    import mine

    torch.manual_seed(1)
    plain = mine.Net(4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets in mine.loader():
        optimizer.zero_grad()
        mine.loss(plain(inputs), targets).backward()
        optimizer.step()
    trained = load_file("runs/r/weights.safetensors")
    assert all(torch.equal(trained[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize(
    "values",
    [
        {"loss": {"mine:huber": {"delta": 0.5}}},
        {"loss": "torch.nn.functional.mse_loss"},
        {"loss": "torch.nn:MSELoss"},
        {"loss": {"torch.nn:SmoothL1Loss": {"beta": 0.5}}},
        {"optimizer": {"mine:sgd": {"lr": 0.1}}},
        {"optimizer": {"torch.optim:SGD": {"lr": 0.1}}},
        {"optimizer": "torch.optim:SGD"},
        {"optimizer": ["sgd(lr=0.1)"]},
        {"optimizer": {"layers": "sgd(lr=0.1)"}, "model": {"mine:Net": {}}},
        {"optimizer": {"layers": {"sgd": {"lr": 0.1}}}},
        {"schedule": "mine:half"},
        {"schedule": {"torch.optim.lr_scheduler:StepLR": {"step_size": 3}}},
        {"schedule": {"hocket.schedules:Cosine": {"warmup": "0.1dur"}}},
        {"train_data": None, "data": "mine:splits"},
        {"train_data": None, "data": {"mine:splits": {"count": 8}}},
        {"train_data": {"torch.utils.data:DataLoader": {"dataset": "mine:Squares", "batch_size": 8}}},
        {"eval_data": "mine:loader", "metrics": {"a": "mine:Largest"}},
        {"callbacks": ["hocket_insight.callbacks.nan_monitor:NaNMonitor"]},
        {"model": {"mine:Wide": {"factor": 2, "width": 3}}},
        {"model": {"mine:Sized": {"sizes": {"width": 5}}}},
        {"model": {"mine:Sized": {"sizes": {"mine:Sizes": {"width": 5}}, "make": "torch.nn:Tanh"}}},
        {"model": {"torch.nn:Sequential": [{"torch.nn:Linear": [3, 2]}, "torch.nn:ReLU", {"torch.nn:Linear": [2, 1]}]}},
    ],
    ids=lambda values: yaml.safe_dump(values, default_flow_style=True, width=200).strip()[:90],
)  # fmt: skip
def test_own_parts(values: dict[str, object], hocket: Hocket) -> None:
    code, _, failed = hocket(changed(**values), "train")
    assert code == 0, failed


def test_anchors_merge_keys_and_scalars(hocket: Hocket) -> None:
    text = SMALL.replace("train_data: mine:loader\n", "").replace("run_name: r", "run_name: 007") + (
        "x-any: &shared {batch_size: 8}\n"
        "train_data: {mine:loader: &train {<<: *shared, count: 24}}\n"
        "eval_data: {test: {mine:loader: {<<: *train, count: 8}}}\n"
        "optimizer: {sgd: {lr: 1e-2}}\n"
    ).replace("optimizer: {sgd: {lr: 1e-2}}\n", "")
    code, printed, failed = hocket(text, "train", "optimizer.sgd.lr=1e-2")
    assert code == 0 and "test/loss" in printed, failed
    assert Path("runs/007").is_dir()


def test_overrides_at_any_depth(hocket: Hocket) -> None:
    code, planned, failed = hocket(
        FULL, "plan", "model.width=5", "callbacks.early-stopping.patience=7", "callbacks.0={nan-monitor: {}}", "--no-plugins",
        "train_data.dataset.count=24", "eval_data.test.data.batch_size=2", "checkpoints.every=2ep", "clip_gradients=1.0",
        "run_name=12", "plugins=false",
    )  # fmt: skip
    assert code == 0, failed
    assert "Net, 26 parameters" in planned and "patience=7" in planned and "nan-monitor" in planned
    assert "lr-monitor" not in planned
    text = changed(optimizer={"adamw": {"lr": 0.5}})
    assert hocket(text, "plan", "optimizer.adamw.lr=0.25", "model.init_args.width=6")[0] == 2  # not in this form
    config = changed(model={"class_path": "mine.Net"})
    assert "Net, 31 parameters" in hocket(config, "plan", "model.init_args.width=6")[1]
    assert "Net, 31 parameters" in hocket(config, "plan", "model.width=6")[1]
    assert "Net, 36 parameters" in hocket(SMALL, "plan", "model.width=7", "optimizer.sgd.lr=0.3")[1]


# --- what does not


def _typo(name: str) -> str:
    """Omit the second letter of the last word."""
    start = max(name.rfind(mark) for mark in ".:/") + 1
    return name[: start + 1] + name[start + 2 :] if len(name) > start + 2 else f"{name}x"


#: Keys that users choose, and values for which any text is valid.
_LABELS, _TEXTS = {"test", "largest"}, {"monitor", "folder", "run_name"}


def _typos() -> Iterator[tuple[int, str]]:
    """Yield each line of FULL with a typo in its key, and with wrong values."""
    for number, line in enumerate(FULL.splitlines()):
        found = re.fullmatch(r"([ -]*)([\w:.-]+?)(?:: (.*)|:)?", line)
        assert found is not None, line
        indent, key, value = found.groups()
        if key not in _LABELS:
            yield number, f"{indent}{_typo(key)}{line[len(indent) + len(key) :]}"
        if line == f"{indent}{key}":  # an item of a list
            yield from ((number, f"{indent}{wrong}") for wrong in ("5", "[a]", "{a: 1}"))
        elif value is not None:
            wrongs = ["{a: 1}"]
            if re.fullmatch(r"[\d.]+(e-\d)?", value):
                wrongs += (
                    ["[1, 2]"]
                    + (["ten"] if key != "seed" else ["1.5"])
                    + (["-3"] if key not in ("seed", "delta", "scale") else [])
                )
            elif value in ("true", "false"):
                wrongs += ["yes", "5"]
            elif value.startswith("["):
                wrongs += ["nonsense", "[1, 2, 3, 4]"]
            elif key not in _TEXTS:
                wrongs += [_typo(value), "5", *(["true"] if key != "profile" else [])]
            yield from (
                (number, f"{indent}{key}: {wrong}") for wrong in wrongs if not (key == "scale" and wrong[0] in "[{")
            )


@pytest.mark.long
def test_every_typo_is_found_by_its_line(hocket: Hocket) -> None:
    """In keys and in values, at any depth: one paragraph with file and line, and exit code 2."""
    lines = FULL.splitlines()
    assert hocket(FULL, "plan")[::2] == (0, "")
    tried, missed = 0, []
    for number, line in _typos():
        code, _, said = hocket("\n".join([*lines[:number], line, *lines[number + 1 :]]), "plan")
        tried += 1
        if code != 2 or said.count("\n") != 1 or not said.startswith(f"hocket: c.yaml:{number + 1}: "):
            missed.append((line.strip(), code, said))
    assert not missed
    assert tried > 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: mine:Nett", ["c.yaml:1: mine has no 'Nett'. Did you mean 'Net'?"]),
        ("model: {torch.nn:Linaer: [3, 1]}", ["c.yaml:1: torch.nn has no 'Linaer'. Did you mean 'Linear'?"]),
        ("model: {torch.nn:Conv2D: [3, 1]}", ["c.yaml:1: torch.nn has no 'Conv2D'. Did you mean 'Conv2d'?"]),
        ("model: mine:Net\noptimizer: {torch.optim:AdamWW: {}}", ["torch.optim has no 'AdamWW'. Did you mean 'AdamW'?"]),
        ("model: mine:Net\noptimizer: torch.optim.Adam", ["'torch.optim.Adam'", "In YAML", "'torch.optim:Adam'"]),
        ("model: {mine:Net: {width: 1_000}}", ["c.yaml:1:", "width: 1_000` is text", "Write `width: 1000`"]),
        (f"{SMALL}eval_data: {{'': mine:loader}}", ["c.yaml:9: eval_data has a set without a label", "`eval_data: {test: …}`"]),
        (f"{SMALL}null: 4", ["c.yaml:9: null, which is not text, is not a key of a configuration. A key that only holds"]),
        (f"{SMALL}_x: 1", ["c.yaml:9: '_x' is not a key", "begins with x-, such as x-shared"]),
        (f"{SMALL}_duration: 1ep", ["c.yaml:9:", "Did you mean 'duration'?"]),
        (f"{SMALL}modell: {{x: 1}}", ["c.yaml:9:", "Did you mean 'model'?"]),
        (f"{SMALL}? [a, b]\n: 4", ["c.yaml:9: A key is a list or a mapping; it should be text. Write a name before"]),
        (f"{SMALL}folder: {{{{x}}}}", ["c.yaml:9: A key is a list or a mapping", "hocket replaces neither"]),
        (f"{SMALL}callbacks: [early-stopping: {{monitor: train/loss, patience: two}}]", ["c.yaml:9: `patience: two`: 'two'"]),
        ("model: mien:Net", ["c.yaml:1: There is no module 'mien'", "Did you mean 'mine'?"]),
        ("model: mine", ["c.yaml:1:", "`model: mine` is text", "an object of class Module", "`model: module:name`"]),
        ("model: mine:Largest", ["c.yaml:1: model is Largest", "torch.nn.Module"]),
        ("model:\n  mine:Wide:\n    factor: 1\n    widht: 2", ["c.yaml:4:", "argument 'widht'", "Did you mean 'width'?"]),
        ("model: {mine:Wide: {width: 2}}", ["c.yaml:1:", "mine:Wide needs factor"]),
        ("model: {mine:Net: {width: 0}}", ["c.yaml:1:", "ValueError: width=0 is too small (mine.py:"]),
        ("model: {mine:Net: {scale: ten}}", ["c.yaml:1:", "scale: ten` is text", "default is 1.0"]),
        ("model: {mine:Sized: {sizes: {widht: 3}}}", ["c.yaml:1: Sizes has no argument 'widht'. Did you mean 'width'?"]),
        ("model: mine:Net\n\tloss: x", ["c.yaml:2:", "not YAML", "not tabs"]),
        ("model: mine:Net\nloss: 'x", ["c.yaml:2:", "not YAML"]),
        (
            "model: {mine:Net: {scale: {1: a,\n true: b}}}",
            ["c.yaml:2: true and 1 are one key in Python, first in c.yaml:1. Put one of them into quotes."],
        ),
        ("model: mine:Net\nmodel: mine:Net", ["c.yaml:2: 'model' is given twice, first in c.yaml:1"]),
        ("model: &a [*a]", ["c.yaml:1:", "contains itself"]),
        ("model: !!python/name:os.system", ["c.yaml:1:", "The tag"]),
        ("- model", ["c.yaml:1:", "a mapping"]),
        ("", ["c.yaml:1:", "a mapping"]),
        ("loss: mine:loss", ["c.yaml: There is no model."]),
        ("model: mine:Net\ntrain_data: mine:loader", ["c.yaml: There is no duration.", "`duration: 10ep`"]),
        ("model: mine:Net\nduration: 1ep", ["c.yaml: There is no train_data."]),
        ("model: mine:Net\ntrain_data: mine:loader\nduration: 1ep", ["c.yaml: There is no optimizer."]),
        (f"{SMALL}data: mine:splits", ["c.yaml:3:", "train_data and data are both given"]),
        (f"{SMALL}resume: nope", ["c.yaml:9:", "'nope'"]),
        (
            f"{SMALL}callbacks: [lr-monitor, early-stopping(monitor=train/loss, patience=3)]",
            ["c.yaml:9:", "'early-stopping(monitor=train/loss, patience=3)'", "`{early-stopping: {monitor: train/loss, pat"],
        ),
        (
            SMALL.replace("sgd(lr=0.1)", "{a: sgd(lr=0.1, momentum='x'), b: adam}"),
            ["c.yaml:4:", """in quotes: "sgd(lr=0.1, momentum='x')";""", "`{sgd: {lr: 0.1, momentum: x}}`"],
        ),
        (f"{SMALL}callbacks: [early-stopping(train/loss, 3)]", ["c.yaml:9:", "'early-stopping(train/loss, 3)'", "{name:"]),
        (f"{SMALL}compile: {{mod: default}}", ["c.yaml:9: torch.compile has no argument 'mod'. Did you mean 'mode'?"]),
        (f"{SMALL}\nmetrics:\n  a: mine:loss", ["c.yaml:11:", "mine:loss needs outputs, targets"]),
        (
            f"{SMALL}\ncallbacks:\n- early-stopping: {{monitor: eval/x, mode: min}}\neval_data: mine:loader",
            ["c.yaml:11:", "monitors 'eval/x'", "`metrics: {x: …}`"],
        ),
        (changed(loss="mine:huber"), ["mine:huber needs delta"]),
        (changed(train_data="mine:Squares"), ["c.yaml:", "Wrap it in a loader"]),
        (changed(train_data=["mine:loader"]), ["c.yaml:", "mine:loader is a function. Write `train_data: mine:loader`"]),
        (changed(train_data=[1, 2]), ["c.yaml:", "1 is not a batch. Write `train_data: module:name`"]),
        (changed(eval_data=["mine:loader"]), ["c.yaml:", "such as `eval_data: {test: mine:loader}`"]),
        (changed(eval_data={"a": ["mine:loader", "mine:loader"]}), ["c.yaml:", "Write `eval_data.a: module:name`"]),
        (changed(inputs=3), ["c.yaml", "has nothing at 3; it has 2 items"]),
        (changed(optimizer="sgd(lr=-1)"), ["c.yaml:", "Invalid learning rate: -1"]),
    ],
)  # fmt: skip
def test_errors(text: str, words: list[str], hocket: Hocket) -> None:
    code, _, said = hocket(text, "train" if "duration" in text or "c.yaml: There is no" in words[0] else "plan")
    assert code == 2 and said.count("\n") == 1 and "Traceback" not in said, said
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("profile=5baa", "`profile=5baa`: '5baa' is not a time"),
        ("profile={every: 5ba}", "'profiler' has no argument 'every'"),
        ("compile=fastest", "`compile=fastest` is not a mode of torch.compile"),
        ("resume=runs/none", "has no checkpoint 'none'"),
        ("resume=auto", "pass `checkpoints=runs/a` as well"),
        ("folder=c.yaml", "c.yaml is a file and no folder"),
        ("checkpoints=c.yaml", "c.yaml` is a file, and checkpoints need a folder"),
    ],
)
def test_settings_are_checked_before_a_model_is_made(change: str, words: str, hocket: Hocket) -> None:
    text = SMALL.replace("model: mine:Net", "model: mine:never")
    assert text != SMALL
    code, _, said = hocket(text, "train", change)
    assert code == 2 and said.count("\n") == 1 and words in said
    assert "a model was made" in hocket(text, "train")[2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.adamw.lr=1", ["optimizer is 'sgd', not 'adamw'", "optimizer=adamw"]),
        ("optimizer.sgd.lr=ten", ["'optimizer.sgd.lr=ten': `optimizer.sgd.lr=ten` is text; it should be a number."]),
        ("optimizr.sgd.lr=1", ["'optimizr' is not a key", "'optimizer'"]),
        ("callbacks.lr-monitr.a=1", ["callbacks"]),
        ("model.width=1_000", ["`model.width=1_000` is text; it should be an integer. Write model.width=1000."]),
        ("optimizer.sgd.lr=", ["'optimizer.sgd.lr=': An override is key=value, and there is no value"]),
        ("loss=3", ["""'loss=3': `"loss='3'"` is not the name of a loss"""]),
        ("accumulate=4", ["`accumulate=4ba` to train on four"]),
        ("resume=true", ["`resume=auto` searches the folder of checkpoints"]),
        ("model.widht=3", ["no argument 'widht'", "'width'"]),
        ("seed.a=3", ["seed is 1, which has no 'a'"]),
        ("duration", ["key=value"]),
        ("resume=nope", ["'resume=nope'", "'nope'"]),
    ],
)
def test_errors_of_overrides(change: str, words: list[str], hocket: Hocket) -> None:
    code, _, said = hocket(SMALL, "train", change)
    assert code == 2 and said.count("\n") == 1 and "Traceback" not in said, said
    for word in words:
        assert word in said


def test_an_override_is_given_once(hocket: Hocket) -> None:
    code, _, said = hocket(SMALL, "plan", "duration=1ep", "optimizer.sgd.lr=1", "duration=2ep")
    assert code == 2 and "'duration=…': This override is given twice" in said and said.count("\n") == 1


def test_files_that_cannot_be_read(hocket: Hocket, capsys: pytest.CaptureFixture[str]) -> None:
    hocket(SMALL, "plan")
    Path("latin.yaml").write_bytes(b"model: \xe4")
    Path("broken.py").write_text("def f(:\n")
    for arguments, words in [
        (["d.yaml"], "d.yaml: No such file or directory. Did you mean 'c.yaml'"),
        (["."], "Is a directory"),
        (["latin.yaml"], "UTF-8"),
        ([], "Name a configuration file"),
        (["c.yaml", "model=broken:Net"], "SyntaxError: invalid syntax (broken.py:1)"),
    ]:
        assert main(["train", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_value_that_is_missing_before_another_override(hocket: Hocket) -> None:
    for arguments, words in [
        (
            ["optimizer.sgd.lr=", "duration=1ba"],
            "'optimizer.sgd.lr=': An override is key=value, and there is no value.",
        ),
        (["optimizer.sgd.lr=", "3"], "without spaces. Write optimizer.sgd.lr=3."),
        (["optimizer.sgd.lr", "=", "3"], "without spaces. Write optimizer.sgd.lr=3."),
        (["optimizer.sgd.lr", "=3"], "without spaces. Write optimizer.sgd.lr=3."),
        (["=4"], "'=4': An override is key=value, and there is no key. Write one first, such as seed=4."),
        (["="], "'=': An override is key=value, and there is no key. Write one first, such as seed=3."),
        (["duration=1ba", "=4"], "'=4': An override is key=value, and there is no key."),
        (["optimizer.sgd.lr="], "'optimizer.sgd.lr=': An override is key=value, and there is no value."),
    ]:
        code, _, said = hocket(SMALL, "train", *arguments)
        assert code == 2 and said.count("\n") == 1 and words in said


def test_true_and_false_are_no_folders(hocket: Hocket) -> None:
    text = changed(run_name=None)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, said = hocket(text, "train", "checkpoints=true", "resume=true")
    assert code == 0 and "`checkpoints: true` is read as `checkpoints: runs/checkpoints`" in said, said
    assert Path("runs/checkpoints").is_dir()
    assert hocket(text, "train", "checkpoints=false", "resume=false")[0] == 0
    assert not Path("true").exists() and not Path("false").exists()


def test_what_evaluates_nothing_is_said_as_in_a_file(hocket: Hocket) -> None:
    text = changed(eval_data={"test": "mine:loader"}, metrics={"error": "mse"}, loggers=[])
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, said = hocket(text, "train", "eval_data=null")
    assert code == 0 and "or no metrics." in said and "trainer." not in said
    code, _, said = hocket(text, "evaluate", "--weights", "runs/r", "eval_data=null")
    assert code == 2 and "Write `eval_data: module:function`, or return it from eval()" in said
    code, _, said = hocket(text, "evaluate", "--weights", "runs/r", "model.width=7")
    assert code == 2 and "They are of the run runs/r: name that run" in said and "remap" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate", "--ranks", "0"], "--ranks 0 is not a number of ranks. Write --ranks 2."),
        (["estimate", "--memory", "24"], "--memory 24 is not a size with its unit. Write --memory 24GiB"),
        (["summary", "--depth", "-1"], "--depth -1 is not a number of levels. Write --depth 1"),
    ],
)
def test_numbers_that_mean_nothing(arguments: list[str], words: str, hocket: Hocket) -> None:
    code, _, said = hocket(SMALL, *arguments)
    assert code == 2 and said.count("\n") == 1 and words in said


def test_a_traceback_on_request_and_for_bugs(hocket: Hocket) -> None:
    code, _, said = hocket(SMALL, "train", "--traceback", "model.width=0")
    assert code == 2 and "Traceback" in said and "mine.py" in said
    with pytest.raises(AttributeError, match="no_such_attribute"):
        hocket(SMALL, "train", "loss=mine:crash")


# --- --print-config


def test_the_printed_configuration_can_be_saved_and_run(hocket: Hocket) -> None:
    _, planned, _ = hocket(FULL, "plan", "model.width=5")
    code, printed, failed = hocket(FULL, "plan", "model.width=5", "--print-config")
    assert code == 0, failed
    assert yaml.safe_load(printed)["model"] == {"mine:Net": {"width": 5}}
    assert hocket(printed, "plan", "--print-config")[1] == printed
    # Named plug-ins have all arguments now, which are those that they had.
    short = re.compile(r"\(hocket[\w-]* [^)]*\)")
    assert short.sub("", hocket(printed, "plan")[1]) == short.sub("", planned)


def test_every_key_is_printed_with_its_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    from hocket_cli.keys import keys

    assert main(["train", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) is None  # defaults are comments
    defaults = yaml.safe_load("\n".join(line[1:] for line in printed.splitlines() if re.match(r"#\w", line)))
    assert defaults == {key: about.default for key, about in keys().items()}
    text = " ".join(line.removeprefix("# ") for line in printed.splitlines())
    for about in keys().values():
        assert about.documentation and about.documentation in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("eval_data.tst.count=3", ["eval_data has no set 'tst'; known: test", "eval_data.tst=…"]),
        ("optimizer.momentum=0.9", ["optimizer is 'sgd'", "Write optimizer.sgd.momentum=0.9."]),
        ("callbacks.1.patience=1", ["callbacks.1 is 'early-stopping'", "Write callbacks.1.early-stopping.patience=1."]),
        ("optimizer={adamw: {lr: 0.1}, sgd: {lr: 0.1}}", ["adamw, sgd are 2 optimizers", "head: {sgd: {lr: 0.1}}"]),
        (
            "metrics.eror.scale=2",
            ["metrics has no metric 'eror'; known: error", "Did you mean 'error'?", "metrics.eror=…"],
        ),
        (
            "metrics={acc: acuracy}",
            ["`metrics.acc=acuracy`", "'accuracy', 'mae' or 'mse'. Write metrics.acc=accuracy."],
        ),
    ],
)
def test_overrides_that_name_nothing(hocket: Hocket, change: str, words: list[str]) -> None:
    text = changed(
        eval_data={"test": "mine:loader"},
        metrics={"error": "mine:Largest"},
        callbacks=["lr-monitor", {"early-stopping": {"monitor": "test/loss"}}],
    )
    code, _, said = hocket(text, "plan", change)
    assert code == 2 and all(each in said for each in words), said
    for works in ("eval_data.other=mine:loader", "callbacks.1.early-stopping.patience=1"):
        code, _, said = hocket(text, "plan", works)
        assert code == 0, said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("loss=croos_entropy", ["loss=croos_entropy", "Did you mean 'cross_entropy'"]),
        ("metrics=[acuracy]", ["acuracy", "accuracy, mae, mse"]),
        ("train_metrics=acuracy", ["acuracy", "accuracy, mae, mse"]),
        ("metrics=[{error: mse}]", ["{error: mse}]': metrics: ", "Write `metrics: {error: mse}`."]),
        (
            "metrics=[mae, {mine:Net: {width: 3}}, {a: mse, b: mae}]",
            ["Write `metrics: {mae: mae, Net: {mine:Net: {width: 3}}, a: mse, b: mae}`."],
        ),
    ],
)
def test_names_of_losses_and_metrics_are_checked_before_anything_is_made(
    hocket: Hocket, change: str, words: list[str]
) -> None:
    text = changed(model="mine:Net", train_data="mine:loader", eval_data={"test": "mine:loader"})
    Path("mine.py").write_text(
        Path("mine.py").read_text() + "\n\ndef loader(*args, **named):\n    raise SystemExit('made')\n"
    )
    code, _, said = hocket(text, "train", change)
    assert code == 2 and all(each in said for each in words) and "made" not in said, said


def test_a_metric_by_its_name(hocket: Hocket) -> None:
    text = changed(eval_data={"test": "mine:loader"}, metrics={"error": "mse"}, run_name="r", loggers=[])
    code, said, failed = hocket(text, "train", "duration=1ba")
    assert code == 0 and "test/error " in said, failed


def test_what_is_no_configuration(hocket: Hocket, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mine.py"]) == 2
    said = capsys.readouterr().err
    assert "mine.py: It is a Python program" in said and "`python mine.py`" in said
    code, _, said = hocket(SMALL, "train", "--duration=3ep")
    assert code == 2 and said.count("\n") == 1 and "is changed without dashes: duration=3ep" in said
    code, _, said = hocket(SMALL, "evaluate", "--weights", "best")
    assert code == 2 and "There is no checkpoints. Add a line such as `checkpoints: {folder: runs/a, best:" in said
    code, _, said = hocket(SMALL, "evaluate", "--weights", "bset")
    assert code == 2 and "There is no bset in" in said and "load_weights" not in said


@pytest.mark.parametrize("command", ["train", "plan", "sweep"])
def test_the_file_of_a_sweep_is_no_configuration(
    command: str, hocket: Hocket, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s.yaml").write_text("config: c.yaml\nmetric: test/loss\nparameters: {seed: [1, 2]}\n")
    Path("again.yaml").write_text("config: s.yaml\nmetric: test/loss\nmode: min\nparameters: {seed: [1, 2]}\n")
    assert main([command, "again.yaml" if command == "sweep" else "s.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "`hocket sweep s.yaml`, or give the configuration that it names: c.yaml." in said


@pytest.mark.long
def test_control_c_ends_with_one_sentence_and_no_traceback(
    hocket: Hocket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends by the signal, so that a loop of the shell ends too, and other ranks."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    Path("mine.py").write_text(
        f"{MINE}\nimport signal\ndef pressed(outputs, targets):\n    signal.raise_signal(signal.SIGINT)\n"
        "    return outputs.square().mean()\ndef early(*_):\n    raise KeyboardInterrupt\n"
    )

    def end(text: str) -> str:
        Path("c.yaml").write_text(text)
        command = [sys.executable, "-m", "hocket", "train", "c.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == -signal.SIGINT
        return done.stderr

    said = end(changed(loss="mine:pressed"))
    assert said.count("hocket: interrupted") == 1 and "Traceback" not in said, said
    with pytest.raises(KeyboardInterrupt):  # within a batch, as with several ranks, which stop at different batches
        hocket(changed(loss="mine:early", run_name="s"), "train")
    said = capsys.readouterr().err
    assert said.count("hocket: interrupted") == 1 and "runs/s" not in said and not Path("runs/s").exists()
    assert end(changed(train_data="mine:early")).splitlines()[-1:] == ["hocket: interrupted."]
    hook = sys.excepthook
    with pytest.raises(KeyboardInterrupt):
        hocket(changed(train_data="mine:early"), "train", "--traceback")
    assert sys.excepthook is hook  # it prints the traceback


def test_what_to_do_about_a_loss_that_is_not_finite_is_written_as_in_a_file(hocket: Hocket) -> None:
    Path("mine.py").write_text(f"{MINE}\ndef nan(outputs, targets):\n    return outputs.mean() * float('nan')\n")
    code, _, said = hocket(changed(loss="mine:nan"), "train")
    assert code == 1 and "`clip_gradients: 1.0`" in said and "`nonfinite: skip`" in said, said
    assert "callbacks=" not in said and "True" not in said


# --- advice


def test_all_advice_is_yaml() -> None:
    """What is said of the names of other libraries, in backquotes, is read as a key of a configuration with a value."""
    from hocket.help import names
    from hocket_cli.keys import keys
    from hocket_cli.yaml_messages import key_of

    said = [
        key_of(others.split()[0], 3)
        for table in (("keys",), ("arguments", "Trainer"))
        for others in names.table(*table)
    ]
    quoted = [each for text in said for each in text.split("`")[1::2] if not each.startswith(("hocket ", "torchrun "))]
    assert all(said) and len(quoted) > 60
    for each in quoted:
        ((key, value),) = yaml.safe_load(each).items()
        assert (key in keys() and value is not None) or ":" in key or key == "batch_size", each
    assert not [text for text in said if re.search(r"(?<!-)\b[a-z_]+='", text)], "no Python"


#: Values that other libraries take, by one name of their argument; 3 for all others.
_THEIRS = {
    "accelerator": ["gpu", "cuda", "tpu", "cpu", "auto"], "max_duration": [3, "3ep", "1h"], "algorithm": ["EMA"],
    "callback": ["LearningRateMonitor"], "criterion": ["CrossEntropyLoss", "mse"], "default_root_dir": ["out"],
    "ckpt_path": ["auto"],
}  # fmt: skip


def _accepted(written: str) -> None:
    """Check lines of a configuration without the code that they name."""
    from hocket_cli import imports
    from hocket_cli.config import Configuration
    from hocket_cli.document import parse

    with imports.unread():
        Configuration(parse(written, "c.yaml")).check(None)


def _advice(written: str) -> str:
    """The lines that the error of a configuration says to write."""
    with pytest.raises(plugins.PluginError) as caught:
        _accepted(written)
    (found,) = re.findall("[Ww]rite `([^`]*)`", str(caught.value))
    return str(found)


def test_all_advice_for_keys_is_accepted_when_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.help import names
    from hocket_cli.keys import keys
    from hocket_cli.yaml_messages import key_of

    monkeypatch.chdir(tmp_path)
    typed = 0
    for table in (("keys",), ("arguments", "Trainer")):
        for others in names.table(*table):
            values = next((_THEIRS[name] for name in others.split() if name in _THEIRS), [3])
            for name in others.split():
                for value in values:
                    for each in key_of(name, value).split("`")[1::2]:
                        if each.partition(":")[0] in keys() and "…" not in each:  # it has a value
                            extra = "checkpoints: runs/a\n" if each == "resume: auto" else ""
                            _accepted(f"{each}\n{extra}")
                            typed += 1
    assert typed > 200


@pytest.mark.parametrize("key", ["device", "precision", "strategy"])
def test_advice_for_plug_ins_of_other_libraries_is_accepted_when_it_is_typed(key: str) -> None:
    from hocket.help import names
    from hocket_cli.keys import KIND_OF_KEY

    for others in names.table("plugins", KIND_OF_KEY[key]).values():
        for name in others.split():
            _accepted(_advice(f"{key}: '{name}'"))


@pytest.mark.parametrize(
    ("argument", "written"),
    [("warmup_steps", "warmup: 100ba"), ("warmup_epochs", "warmup: 100ep"), ("total_steps", "t_max: 100ba")],
)
def test_advice_for_arguments_of_plug_ins_has_their_unit(argument: str, written: str) -> None:
    assert _advice(f"schedule: {{cosine: {{{argument}: 100}}}}") == written
    _accepted(f"schedule: {{cosine: {{{written}}}}}")


def test_a_device_is_converted_as_in_python() -> None:
    _accepted("device: cpu:0")
    with pytest.raises(plugins.PluginError, match=r"`device: cuda:9` chooses one of several.*CUDA_VISIBLE_DEVICES=9"):
        _accepted("device: cuda:9")


@pytest.mark.parametrize("given", ["clip_gradients: -1", "metrics: [acuracy]", "train_metrics: acuracy"])
def test_values_in_an_error_are_accepted_when_they_are_typed(given: str) -> None:
    with pytest.raises(plugins.PluginError) as caught:
        _accepted(given)
    key, said = given.partition(":")[0], str(caught.value)
    for each in [f"{key}: {each}" for each in re.findall(r"\[\w+, [\d.]+\]", said)] + said.split("`")[3::2]:
        _accepted(each)
    assert "('" not in said


def test_weights_in_a_folder_and_the_only_set(hocket: Hocket) -> None:
    text = changed(eval_data={"val": "mine:loader"}, run_name="r", loggers=[], checkpoints="ck")
    assert hocket(text, "train", "duration=1ep")[0] == 0
    code, first, said = hocket(text, "evaluate", "--weights", "ck")
    assert code == 0 and "hocket: the weights of ck are those of ck/ep1-ba2." in said
    code, second, said = hocket(text, "evaluate", "--weights", "runs/r")
    assert code == 0 and "those of runs/r/weights.safetensors." in said
    assert first == second
    code, _, _ = hocket(text, "predict", "--weights", "ck/ep1-ba2", "--out", "new/o.safetensors")
    assert code == 0 and len(load_file("new/o.safetensors")["outputs"]) == 16
    text = changed(eval_data={"val": "mine:loader", "other": "mine:loader"}, checkpoints="ck")
    code, _, said = hocket(text, "predict", "--weights", "ck/ep1-ba2", "--out", "o.safetensors")
    assert code == 2 and "has the evaluation sets other, val. Name the one to predict on, such as --set other." in said


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_package_that_is_missed_late_is_named_in_one_paragraph(
    hocket: Hocket, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    pytest.importorskip("hocket_strategies")
    for each in ("torchao", "torchao.float8", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, each, None)
    code, out, said = hocket(changed(), "train", f"precision={precision}")
    assert code == 2 and not out and said.count("\n") == 1 and "Type: pip install 'torchao>=" in said


def test_a_run_that_is_over_and_one_that_begins(hocket: Hocket) -> None:
    text = changed(run_name="r", loggers=[], checkpoints="ck", resume="auto", duration="1ep")
    Path("ck").mkdir()
    Path("ck/notes.txt").touch()
    begins = f"there is no checkpoint in {Path('ck').resolve()} yet, only notes.txt, so a new run begins"
    assert begins in hocket(text, "train")[2]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, said = hocket(text, "train")
    assert code == 0 and "Nothing is trained; give a longer duration, or `duration: …` for more." in said
    assert "hocket: to train longer: hocket train c.yaml resume=auto 'duration=…'" in said


def test_modules_beside_the_file(hocket: Hocket) -> None:
    hocket(SMALL, "plan")
    Path("elsewhere").mkdir()
    Path("elsewhere/beside.py").write_text("from mine import Net\n")
    Path("elsewhere/c.yaml").write_text(SMALL.replace("mine:Net", "beside:Net"))
    assert main(["plan", "elsewhere/c.yaml"]) == 0
    sys.modules.pop("beside", None)


@pytest.mark.parametrize(("override", "write"), [(False, "`resume: null`"), (True, "`resume=null`")])
def test_what_does_not_fit_a_checkpoint_is_said_without_calls_of_python(override: bool, write: str) -> None:
    """A command cannot call trainer.load_state_dict."""
    from hocket_cli.yaml_messages import in_yaml

    message = (
        "The model is not the checkpoint's. Give the Trainer the same model«, or omit these by ignore=['model.*']¦». «To omit "
        "parts, call trainer.load_state_dict(tree, ignore=['…']), or with strict=False¦To begin a new run instead, write »"
        "«¦resume=None»«¦, and another folder in checkpoints»."
    )
    said = in_yaml(message, override)
    assert "ignore" not in said and "strict" not in said and "trainer." not in said
    assert (
        said.startswith("The model is not the checkpoint's. Give the Trainer the same model. To begin a new run")
        and write in said
    )
