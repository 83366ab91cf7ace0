"""`Result.history`: the same numbers as in the file of a logger, in columns that can be plotted, in notebooks too."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_data, make_model, make_trainer
from torch.nn import functional as F

import hocket
from hocket.basics.history import POSITION, History, Recorder

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def run(**changes: Any) -> hocket.Trainer:
    return make_trainer(
        **{"device": "cpu", "run_name": "run", "log_every": "2ba", "eval_data": {"test": make_data(8)}, **changes}
    )


def rows_of_file() -> list[dict[str, Any]]:
    """The rows of the file, those of one batch together."""
    merged: dict[int, dict[str, Any]] = {}
    for line in Path("runs/run/metrics.jsonl").read_text().splitlines():
        if "hyperparameters" not in (row := json.loads(line)):
            merged.setdefault(row["batch"], {}).update(row)
    return list(merged.values())


def rows_of(history: History) -> list[dict[str, Any]]:
    rows = [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]
    return [{name: value for name, value in row.items() if not math.isnan(value)} for row in rows]


def test_it_has_the_rows_that_a_logger_writes_over_several_fits() -> None:
    trainer = run(loggers=["jsonl"], callbacks=["lr-monitor"], eval_every="1ba")
    first = trainer.fit("3ba").history
    before = copy.deepcopy(first)
    history = trainer.fit("1ep").history
    expected = [{**row, "seconds": pytest.approx(row["seconds"], abs=1e-6)} for row in rows_of_file()]
    assert rows_of(history) == expected and len(expected) == 6
    assert rows_of(first) == rows_of(before) == expected[:3], "an earlier result does not change"
    assert [type(history[name][0]) for name in POSITION] == [int] * 4 + [float]


def test_the_training_loss_without_evaluation_is_that_of_the_formula() -> None:
    """After one batch: the loss of the initial weights on it."""
    batch = next(iter(make_data(shuffle=False)))
    result = run(eval_data=None, train_data=make_data(shuffle=False)).fit("1ba")
    loss = F.cross_entropy(make_model()(batch[0]), batch[1]).item()
    assert result.metrics == {"train/loss": pytest.approx(loss, rel=1e-6)}
    assert result.history["train/loss"] == [result.metrics["train/loss"]] and result.history["batch"] == [1]


def test_going_back_to_an_earlier_state_removes_the_rows_after_it() -> None:
    trainer = run()
    trainer.fit("3ba")
    saved, before = copy.deepcopy(trainer.state_dict()), trainer.result().history
    trainer.fit("3ba")
    trainer.load_state_dict(saved)
    again = trainer.fit("3ba").history
    straight = run().fit("6ba").history
    assert again["batch"] == straight["batch"] == [*before["batch"], 4, 6]
    assert again["train/loss"] == straight["train/loss"]


def test_series_have_no_gaps_and_names_never_collide() -> None:
    recorder = Recorder()
    now = hocket.Timestamp()
    for batch in range(1, 5):
        now.next_batch(samples=8, tokens=0, seconds=0.5)
        recorder.add(now, {"often": float(batch)})
        if batch % 2 == 0:
            recorder.add(now, {"rarely": batch / 10, "often": -float(batch), "epoch": 7.0})
    history = recorder.table()
    assert history["often"] == [1, -2, 3, -4] and history["batch"] == [1, 2, 3, 4]
    assert math.isnan(history["rarely"][0]) and history.series("rarely") == ([2, 4], [0.2, 0.4])
    assert history.series("rarely", by="seconds") == ([1.0, 2.0], [0.2, 0.4])
    assert history["epoch"] == [0] * 4 and history.series("metric/epoch") == ([2, 4], [7, 7])
    with pytest.raises(KeyError, match=r"no 'test/los' in the history. It has: epoch, batch"):
        history.series("test/los")


def test_pandas_makes_a_data_frame_of_it() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(run().fit().history)
    assert frame["batch"].tolist() == [2, 3, 4, 6] and frame["test/loss"].count() == 2


def test_notebooks_get_escaped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<script>alert(1)</script>"

    class Log(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            state.log({evil: 1.0})

    trainer = run(callbacks=[Log()], eval_data={evil: make_data(8)}, run_name="a&b<i>", log_every="1ba", duration="5ep")
    result = trainer.fit()
    shown = [each._repr_html_() for each in (trainer, trainer.plan(), result, result.history)]
    assert not any("<script" in each or "<i>" in each for each in shown)
    assert "&lt;script" in shown[2] and "&lt;script" in shown[3] and "a&amp;b&lt;i&gt;" in shown[0]
    assert "15 rows" in shown[3] and shown[3].count("<tr>") == 12, "the first and the last five"


def test_texts_say_what_people_look_for() -> None:
    trainer = run(checkpoints=hocket.Checkpoints("runs/a", best=("test/loss", "min", 1)))
    assert repr(trainer.plan()) == str(trainer.plan())
    assert repr(trainer).splitlines()[0] == "Trainer after 0 epochs, 0 batches, 0 samples"
    assert "195 parameters" in repr(trainer)
    result = trainer.fit()
    lines = repr(result).splitlines()
    assert lines[0] == "Result after 2 epochs, 6 batches, 168 samples" and len(lines) < 10
    assert any(
        line.split() == ["best", "test/loss", f"{result.best.value:.6g}", "in", result.best.path] for line in lines
    )


def test_interrupted_fits_have_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Press(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch == 4:
                raise KeyboardInterrupt

    trainer = run(callbacks=[Press()])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.result().history["batch"] == [2, 3] and trainer.result().timestamp.batch == 4
    assert torch.isfinite(torch.tensor(trainer.result().metrics["test/loss"]))
