"""Checkpoints that lost, gained or changed files: damaged ones are passed over by name for the one before."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_script import differences, make, outcome

import hocket
from hocket.checkpoints import CheckpointError, DamagedCheckpointWarning
from hocket_checkpoints.storage import format as formats
from hocket_testkit import run_ranks


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped: checkpoints after five and ten batches."""
    folder = tmp_path_factory.mktemp("half")
    make(folder, duration="2ep", policy={"every": "1ep"}).fit()
    assert hocket.Checkpoints(folder).store.names() == ["ep1-ba5", "ep2-ba10"]
    return folder


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    shutil.copytree(half, tmp_path / "run")
    return tmp_path / "run"


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) * 2 // 3] ^= 16
    file.write_bytes(raw)


def link(file: Path) -> None:
    file.rename(file.parent.parent / file.name)
    file.symlink_to(f"../{file.name}")


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 9),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "flipped": flip,
    "missing": Path.unlink,
    "a link": link,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("part", ["manifest", "tree", "tensors"])
def test_a_damaged_file_is_named_and_the_one_before_taken(run: Path, damage: str, part: str) -> None:
    newest = run / "ep2-ba10"
    (file, *_) = sorted(newest.glob(f"{part}*"))
    DAMAGE[damage](file)
    with pytest.warns(DamagedCheckpointWarning, match=rf"skips 'ep2-ba10'.*{re.escape(file.name)}"):
        trainer = make(run)
    assert trainer.state.timestamp.batch == 5
    with pytest.raises(CheckpointError, match=re.escape(file.name)):
        make("other", resume=newest)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_ends_as_if_nothing_had_happened(tmp_path: Path, ranks: int) -> None:
    def rank_main(rank: int) -> int:
        warnings.simplefilter("ignore", DamagedCheckpointWarning)
        trainer = make(tmp_path, duration="2ep", policy={"every": "1ep"})
        began = trainer.state.timestamp.batch
        trainer.fit()
        return began

    assert run_ranks(rank_main, ranks) == [0] * ranks
    expected = outcome(tmp_path)
    flip(max((tmp_path / "ep2-ba10").iterdir(), key=lambda file: file.stat().st_size))
    assert run_ranks(rank_main, ranks) == [5] * ranks
    assert differences(outcome(tmp_path), expected) == []


def test_files_too_many_are_not_read(run: Path) -> None:
    newest = run / "ep2-ba10"
    (newest / "notes.txt").write_text("best so far")
    (newest / "model.pt").write_bytes(b"\x80\x04")
    (newest / "tensors-00009-0123456789abcdef.safetensors").write_bytes(b"another writer's")
    (newest / "folder").mkdir()
    (run / "logs").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(run).state.timestamp.batch == 10
    assert [problem.partition(":")[0] for problem in formats.verify(newest)] == ["folder", "model.pt", "notes.txt"]


def test_no_valid_checkpoint_is_no_fresh_start(run: Path) -> None:
    """A new run in their place would replace what can perhaps be mended; elsewhere, or if asked to, it begins."""
    for name in ("ep1-ba5", "ep2-ba10"):
        next((run / name).glob("tensors*")).unlink()
    with (
        pytest.warns(DamagedCheckpointWarning) as told,
        pytest.raises(CheckpointError, match="ep1-ba5, ep2-ba10, and none"),
    ):
        make(run)
    with pytest.warns(DamagedCheckpointWarning):
        assert make(run, policy={"overwrite": True}).state.timestamp.batch == 0
    assert len([each for each in told if "is missing" in str(each.message)]) == 2
