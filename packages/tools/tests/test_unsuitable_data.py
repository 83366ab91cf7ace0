"""Data that do not suit a model or its loss, and disks that are full: one paragraph, and what to write instead."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hocket
import hocket_tools
from hocket.basics import safe_files
from hocket.errors import WrongFile, WrongValue
from hocket_tools import predict_into, read_predictions

INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
SAMPLES: dict[str, list[Any]] = {
    "dicts": [{"x": each, "y": 0, "name": "a"} for each in INPUTS],
    "dicts without labels": [{"x": each, "name": "a"} for each in INPUTS],
    "texts": ["a"] * 20,
    "labels of text": [(each, "a") for each in INPUTS],
    "without labels": [(each,) for each in INPUTS],
    "others": [(torch.ones(7), 0)] * 20,
}


def trainer(samples: str, **options: Any) -> hocket.Trainer:
    data = DataLoader(SAMPLES[samples], 10)  # type: ignore[arg-type]
    return hocket.Trainer(
        model=nn.Linear(4, 3), loss="cross_entropy", optimizer="sgd(lr=0.1)", train_data=data, eval_data={"test": data},
        device="cpu", **options,
    )  # fmt: skip


def judge(run: hocket.Trainer) -> Any:
    return hocket_tools.judge(run, "test")


def predict(run: hocket.Trainer) -> Any:
    return predict_into(run, run.state.eval_sets["test"].data, "p")


def tune(run: hocket.Trainer) -> Any:
    return hocket_tools.tune(run, "lr", steps=20, run_steps=0)


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("use", "samples", "said"),
    [
        *((each, "dicts", r"Write Trainer\(inputs='x', targets='y'\)") for each in (judge, predict, tune)),
        *((each, "texts", "Convert samples in the data set") for each in (judge, predict, tune)),
        *((each, "others", "give inputs with 4 features") for each in (judge, predict, tune)),
        *((each, "labels of text", r"Write torch.tensor\(labels\)") for each in (judge, tune)),
        *((each, "without labels", "without labels use .* or `hocket predict`") for each in (judge, tune)),
    ],
)
def test_data_that_do_not_suit_the_model(use: Callable[..., Any], samples: str, said: str) -> None:
    with pytest.raises(WrongValue, match=said) as raised:
        use(trainer(samples))
    assert "contextlib" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_dicts_texts_and_missing_labels_are_read_where_they_have_a_meaning() -> None:
    assert len(judge(trainer("dicts", inputs="x", targets="y")).samples) == 20
    assert predict(trainer("dicts without labels", inputs="x", targets="y")) == 20
    with pytest.raises(WrongValue, match=r"nothing at 'y'.* Write targets="):
        judge(trainer("dicts without labels", inputs="x", targets="y"))


def test_a_refused_prediction_leaves_the_folder_to_others(tmp_path: Path) -> None:
    with pytest.raises(WrongValue, match="inputs='x'"):
        predict_into(trainer("dicts"), trainer("dicts").state.eval_sets["test"].data, tmp_path / "p")
    assert predict_into(trainer("dicts"), [torch.ones(8, 4)], tmp_path / "p") == 8


@pytest.mark.parametrize("file", ["part-000001.npz", "predictions.json"])
def test_a_full_disk_is_said_and_predictions_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    run, data, replacing = trainer("others"), [torch.ones(8, 4), torch.zeros(8, 4)], safe_files.replacing

    def full(path: Path, mode: int | None = None) -> Any:
        if path.name == file and any(path.parent.glob("part-*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return replacing(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(safe_files, "replacing", full)
        with pytest.raises(WrongFile, match=r"No space left on device\. .* the same command continues"):
            predict_into(run, data, tmp_path / "p", batches_per_file=1)
    first = tmp_path / "p/part-000000.npz"
    written = first.stat().st_mtime_ns
    with pytest.raises(ValueError, match="is not complete"):
        read_predictions(tmp_path / "p")
    assert predict_into(run, data, tmp_path / "p", batches_per_file=1) == 16
    assert first.stat().st_mtime_ns == written
