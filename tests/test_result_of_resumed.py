"""A run that is killed and resumed says the same of itself as one without an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket

DATA = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 3) for i in range(6)]


class Rare(hocket.Task):
    """Logs a value in two batches only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: Any) -> Any:
        return self.linear(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch in (3, 9):
            state.log({"rare": float(state.timestamp.batch)})


class Dies(hocket.Callback):
    def __init__(self, at: int) -> None:
        self._at = at

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch == self._at:
            raise InterruptedError


def trainer(folder: Path, dies: int = 0, loggers: Any = ("jsonl",)) -> hocket.Trainer:
    checkpoints = hocket.Checkpoints(folder / "checkpoints", every="2ba", keep=2, best=("test/loss", "min", 2))
    return hocket.Trainer(
        Rare(), DATA, eval_data={"test": DATA}, optimizer="sgd(lr=0.1)", duration="4ep", device="cpu", seed=1,
        eval_every="3ba", log_every="1ba", loggers=loggers, callbacks=["lr-monitor", Dies(dies)], profile_plugins=True,
        folder=folder, run_name="run", checkpoints=checkpoints, resume="auto",
    )  # fmt: skip


def results(tmp_path: Path, **arguments: Any) -> tuple[hocket.Result, hocket.Result]:
    whole = trainer(tmp_path / "whole", **arguments).fit()
    for at in (5, 13, 22):
        with pytest.raises(InterruptedError):
            trainer(tmp_path / "cut", at, **arguments).fit()
    return whole, trainer(tmp_path / "cut", **arguments).fit()


def rows(history: dict[str, list[float]]) -> list[Any]:
    return [(name, column) for name, column in history.items() if name != "seconds"]


@pytest.mark.long
@pytest.mark.parametrize("loggers", [["jsonl"], []])
def test_the_result_is_the_same(tmp_path: Path, loggers: Any) -> None:
    whole, cut = results(tmp_path, loggers=loggers)
    assert cut.metrics == whole.metrics and cut.metrics.keys() >= {"train/loss", "test/loss"}
    assert repr(rows(cut.history)) == repr(rows(whole.history))  # with NaN
    assert cut.history.series("rare") == ([3, 9], [3.0, 9.0])
    assert cut.checkpoints == whole.checkpoints and cut.stop_reason == whole.stop_reason
    assert cut.best is not None and whole.best is not None
    assert (cut.best.metric, cut.best.value) == (whole.best.metric, whole.best.value)
    assert Path(cut.best.path).name == Path(whole.best.path).name
    counted = {
        key: cost.calls for key, cost in whole.costs.items() if key[1] in ("batch_end", "batch_start", "eval_end")
    }
    assert counted and all(cut.costs[key].calls == calls for key, calls in counted.items())


def test_the_summary_is_the_same(tmp_path: Path) -> None:
    results(tmp_path)
    whole, cut = (json.loads((tmp_path / each / "run" / "summary.json").read_text()) for each in ("whole", "cut"))
    for name in ("values", "evaluated", "fit_batches", "status", "stop_reason", "duration", "best", "name"):
        assert cut[name] == whole[name], name
    assert {**cut["position"], "seconds": 0} == {**whole["position"], "seconds": 0}
    assert cut["fit_batches"] == 24 and cut["fit_seconds"] > 0


def test_rows_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    """In the same process: an earlier state has the rows until then."""
    made = trainer(tmp_path)
    made.fit("5ba")
    tree = made.state_dict()
    made.fit("3ba")
    made.load_state_dict(tree)
    assert made.result().history["batch"] == [1, 2, 3, 4, 5]
