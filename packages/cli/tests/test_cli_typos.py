"""A typo in any key of a configuration, at any depth, is found before a model or data exist."""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hocket_cli import main
from hocket_cli.config import Configuration
from hocket_cli.module_origins import importable
from hocket_cli.overrides import VARIABLE, source

EXAMPLES = Path(__file__).parents[3] / "examples"
#: Keys that users choose: any name is right.
LABELS = {"test", "largest", "accuracy", "1x", "2x", "4x", "docs", "code", "extra"}
#: Import paths and plug-ins of all kinds, whose functions write a file when they are called.
MINE = """
import functools
from pathlib import Path
import hocket, torch
from torch.utils.data import DataLoader, TensorDataset

def note(what):
    with open("called", "a") as file:
        file.write(f"{what} ")

class Net(torch.nn.Linear):
    def __init__(self, width: int = 3, inner: torch.nn.Module | None = None, **others):
        note("model")
        super().__init__(width, 1, **others)

class Block(torch.nn.Identity):
    def __init__(self, depth: int = 1, *, scale: float = 1.0):
        note("block")
        super().__init__()

def samples(count: int = 16, *, noise: float = 0.0):
    note("data")
    return TensorDataset(torch.randn(count, 3), torch.randn(count, 1))

def loader(dataset, batch_size: int = 8, options: dict[str, int] | None = None):
    note("loader")
    return DataLoader(dataset, batch_size)

def huber(outputs, targets, delta: float):
    return torch.nn.functional.huber_loss(outputs, targets, delta=delta)

class Largest:
    def __init__(self, relative: bool = False):
        note("metric")
    def reset(self): ...
    def update(self, outputs, targets): ...
    def compute(self):
        return 0.0

class Printing(hocket.Callback):
    def __init__(self, interval: str = "1ep", prefix: str = ""):
        note("callback")
"""
LARGE: dict[str, Any] = {
    "model": {"typo_mine:Net": {"width": 3, "inner": {"typo_mine:Block": {"depth": 2, "scale": 0.5}}, "bias": True}},
    "loss": {"typo_mine:huber": {"delta": 1.0}},
    "train_data": {
        "typo_mine:loader": {"dataset": {"typo_mine:samples": {"count": 32, "noise": 0.1}}, "batch_size": 4}
    },
    "eval_data": {
        "test": {
            "data": {
                "class_path": "typo_mine.loader",
                "init_args": {"dataset": {"typo_mine:samples": {"noise": 0.2}}, "batch_size": 4},
            },
            "every": "1ep",
        }
    },
    "metrics": {"largest": {"typo_mine:Largest": {"relative": False}}},
    "optimizer": {
        "adamw": {
            "lr": 0.01,
            "betas": [0.9, 0.99],
            "weight_decay": 0.1,
            "groups": [{"match": "*bias", "weight_decay": 0.0}],
        }
    },
    "schedule": {"cosine": {"warmup": "0.1dur", "alpha_f": 0.1}},
    "duration": "1ep",
    "callbacks": [
        "lr-monitor",
        {"early-stopping": {"monitor": "test/loss", "patience": 2}},
        {"typo_mine:Printing": {"interval": "2ba", "prefix": "x"}},
    ],
    "loggers": [{"jsonl": {"filename": "rows.jsonl"}}],
    "checkpoints": {"folder": "stored", "every": "1ep", "keep": 2, "best": ["test/loss", "min", 1]},
    "microbatch": 2,
    "clip_gradients": ["norm", 1.0],
    "eval_every": "1ep",
    "device": "cpu",
    "seed": 3,
    "run_name": "r",
}


def typo(name: str) -> str:
    """Omit the second letter of the last word, or double the last of a short one."""
    start = max(name.rfind(mark) for mark in ".:/") + 1
    return name[: start + 1] + name[start + 2 :] if len(name) > start + 2 else name + name[-1]


def keys_of(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every key, at every depth."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(node, dict) and key not in LABELS:
            yield (*path, key)
        yield from keys_of(child, (*path, key))


def mistyped(config: Any, path: tuple[Any, ...]) -> Any:
    """Return a copy in which one key has a typo, at its place."""
    whole = node = copy.deepcopy(config)
    for key in path[:-1]:
        node = node[key]
    items = [(typo(key) if key == path[-1] else key, value) for key, value in node.items()]
    node.clear()
    node.update(items)
    return whole


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "typo_mine", raising=False)
    (tmp_path / "typo_mine.py").write_text(MINE)
    return tmp_path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules and loaders that are constructed."""
    found: list[str] = []
    for cls in (torch.nn.Module, torch.utils.data.DataLoader):

        @functools.wraps(cls.__init__)  # with its signature
        def noted(self: Any, *args: Any, original: Any = cls.__init__, **named: Any) -> None:
            found.append(type(self).__name__)
            original(self, *args, **named)

        monkeypatch.setattr(cls, "__init__", noted)
    return found


def refused(arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command. Return what is wrong with its refusal, which should be one paragraph that names the key, or empty."""
    code = main(arguments)
    said = capsys.readouterr().err
    said = said.partition(".\n")[2] if said.startswith(f"hocket: {VARIABLE}") else said
    word = key.replace(":", ".").rpartition(".")[2]
    fine = code == 2 and said.startswith("hocket: ") and said.count("\n") == 1 and word in said
    return "" if fine else f"{key}: {code} {said!r}"


@pytest.mark.parametrize("name", ["LARGE", *sorted(each.name for each in EXAMPLES.glob("*.yaml"))])
def test_a_typo_in_any_key_is_found_before_anything_is_made(
    name: str, folder: Path, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = LARGE
    if name != "LARGE":
        pytest.importorskip("hocket_nlp" if name != "digits.yaml" else "hocket_vision")
        pytest.importorskip({"digits.yaml": "torchmetrics", "lora.yaml": "peft"}.get(name, "transformers"))
        config = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    Path("c.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    given = source(argparse.Namespace(config="c.yaml", changes=[]))
    importable(given, trusted=False)
    Configuration(given.document).check()  # and imports everything, which may print and make objects
    made.clear()
    capsys.readouterr()
    wrong, paths = [], list(keys_of(config))
    for path in paths:
        Path("c.yaml").write_text(yaml.safe_dump(mistyped(config, path), sort_keys=False))
        if missed := refused(["train", "c.yaml"], typo(path[-1]), capsys):
            wrong.append(missed)
        if made or Path("called").exists():
            wrong.append(f"{path}: made {made}")
            made.clear()
            Path("called").unlink(missing_ok=True)
    assert not wrong, "\n".join(wrong)
    assert len(paths) >= 12 and not Path("runs").exists()


@pytest.mark.parametrize("environment", [False, True], ids=["command line", "environment"])
def test_a_typo_in_an_override_too(
    environment: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(LARGE, sort_keys=False))
    wrong, tried = [], 0
    for path in keys_of(LARGE):
        if ":" in path[-1] or path[-1] in ("class_path", "init_args"):
            continue
        value = LARGE
        for key in path:
            value = value[key]
        if isinstance(value, dict | list):
            continue
        words = [key for key in path[:-1] if ":" not in str(key) and key not in ("class_path", "init_args")]
        change = ".".join(map(str, [*words, typo(path[-1])])) + f"={value}"
        if environment:
            monkeypatch.setenv(VARIABLE, change)
        wrong.append(refused(["train", "c.yaml", *([] if environment else [change])], typo(path[-1]), capsys))
        tried += 1
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert tried > 25 and not Path("called").exists() and not Path("stored").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.width=wide", "it should be an integer"),
        ("model.inner.scale=[1]", "it should be a number"),
        ("train_data.dataset.count=1.5", "it should be an integer"),
        ("eval_data.test.data.dataset.noise=loud", "noise"),
        ("metrics.largest.relative=5", "it should be true or false"),
        ("callbacks.2.interval=[1]", "it should be text"),
        ("schedule.cosine.warmup=10%", "warmup"),
        ("optimizer.adamw.lr=fast", "it should be a number"),
        ("loggers.0.jsonl.filename=[1]", "filename"),
        ("microbatch=two", "microbatch"),
    ],
)
def test_a_value_of_the_wrong_type_too(
    change: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(LARGE, sort_keys=False))
    code = main(["train", "c.yaml", change])
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and words in said, said
    assert not Path("called").exists()


def test_the_file_without_typos_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(LARGE, sort_keys=False))
    assert main(["train", "c.yaml"]) == 0, capsys.readouterr().err
    assert {"model", "block", "data", "loader", "metric", "callback"} == set(Path("called").read_text().split())
