"""A project of Composer's gives the same losses after its imports are changed, and continues mosaicml's checkpoints.

recorded.json has what ``python project.py`` prints under mosaicml 0.32.1 (torch 2.7.0, CPU), and mosaicml-blurpool.pt is its
checkpoint of the case "algorithms" after 4 batches. With COMPOSER_PYTHON, the Python of an environment with mosaicml, both
are made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torchmetrics")
pytest.importorskip("hocket_general")
pytest.importorskip("hocket_vision")

HERE = Path(__file__).parent
PROJECT = HERE / "project.py"
RECORDED: dict[str, Any] = json.loads((HERE / "recorded.json").read_text(encoding="utf-8"))
CLOSE = {"rel": 1e-5, "abs": 1e-5}


def project() -> ModuleType:
    """Return the project after changing its imports alone."""
    module = ModuleType("project")
    source = PROJECT.read_text(encoding="utf-8").replace("from composer", "from hocket_migration.composer")
    exec(compile(source, str(PROJECT), "exec"), module.__dict__)
    return module


ours = project()


def same(mine: dict[str, Any], theirs: dict[str, Any], done: int = 0) -> None:
    expected = theirs["loss"][done:]
    # The row of the batch at which hocket's checkpoint was taken is written after it, by the continued run.
    assert len(mine["loss"]) - len(expected) in (0, int(done > 0))
    assert mine["loss"][-len(expected) :] == pytest.approx(expected, **CLOSE)
    assert mine["rate"] == pytest.approx(theirs["rate"][done:], **CLOSE)
    assert mine["metrics"] == pytest.approx(theirs["metrics"], **CLOSE)
    assert mine["logged"] == theirs["logged"]
    if not done:
        assert rounded(mine["read"]) == rounded(theirs["read"])
        assert mine["at end"] == theirs["at end"]


def rounded(read: list[list[Any]]) -> list[list[Any]]:
    return [[round(each, 5) if isinstance(each, float) else each for each in row] for row in read]


@pytest.mark.parametrize("name", RECORDED)
def test_losses_rates_and_metrics_are_mosaicmls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    same(ours.train(ours.CASES[name]), RECORDED[name])


def test_checkpoint_of_mosaicml_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    same(ours.train(ours.CASES["algorithms"], load_path=HERE / "mosaicml-blurpool.pt"), RECORDED["algorithms"], done=4)


def test_algorithms_that_a_checkpoint_needs_are_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = {**ours.CASES["algorithms"], "algorithms": lambda: ours.CASES["algorithms"]["algorithms"]()[1:]}
    with pytest.warns(UserWarning, match=r"Applied BlurPool\("):
        same(ours.train(case, load_path=HERE / "mosaicml-blurpool.pt"), RECORDED["algorithms"], done=4)


@pytest.mark.parametrize("case", ["algorithms", "adam"])
def test_own_checkpoint_continues_under_its_name(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = {"save_folder": "saved", "save_interval": "2ba", "save_filename": "{batch}.pt"}
    same(ours.train(ours.CASES[case], **kept), RECORDED[case])
    for batch in (2, 4, 6):
        same(ours.train(ours.CASES[case], load_path=f"saved/{batch}.pt"), RECORDED[case], done=batch)


@pytest.mark.skipif(
    "COMPOSER_PYTHON" not in os.environ, reason="mosaicml is in an environment of its own: nox -s porting"
)
def test_against_mosaicml_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(PROJECT, tmp_path)
    command = [os.environ["COMPOSER_PYTHON"], "project.py", "theirs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert theirs.keys() == RECORDED.keys()
    for name, result in theirs.items():
        same(result, RECORDED[name])
    for case in ("algorithms", "adam"):
        for batch in (2, 4, 6):
            same(ours.train(ours.CASES[case], load_path=f"theirs/{case}/{batch}.pt"), theirs[case], done=batch)
