"""What Python's own reader and pandas find in the file."""

from __future__ import annotations

import csv
import math

import pytest
import torch

import hocket
from hocket.loggers.memory import MemoryLogger
from hocket_loggers import CSVLogger
from hocket_loggers.jsonl import JSONLinesLogger


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_columns_appear_later(state_in, tmp_path):
    logger = CSVLogger()
    logger.log_metrics(state_in(tmp_path, 1), {"train/loss": 0.1, 'odd, "name"\nof a metric': 1})
    logger.log_metrics(state_in(tmp_path, 2), {"train/loss": math.nan, "test/accuracy": 0.1 + 0.2, "epoch": 7})
    logger.close(state_in(tmp_path))
    first, second = rows(tmp_path / "metrics.csv")
    assert list(first)[:5] == ["batch", "epoch", "sample", "token", "seconds"]
    assert first['odd, "name"\nof a metric'] == "1" and first["test/accuracy"] == "" and second["seconds"] == "0.25"
    assert float(second["test/accuracy"]) == 0.1 + 0.2 and math.isnan(float(second["train/loss"]))
    assert second["metric/epoch"] == "7" and second["epoch"] == "0"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "name", ["", "..", ".csv", ".a.csv", "a/b.csv", "../b.csv", "/b.csv", "a\\b.csv", "run.json", "metrics.jsonl"]
)
def test_the_name_is_that_of_a_csv_file_in_the_folder(name):
    with pytest.raises(ValueError, match=r"was given filename=.*within the run's folder.*Write filename='\w+\.csv'"):
        CSVLogger(name)
    with pytest.raises(ValueError, match=r"was given filename=.*within the run's folder.*Write filename='\w+\.jsonl'"):
        JSONLinesLogger(name.replace("metrics.jsonl", "metrics.csv"))
    assert CSVLogger("my run.v2.csv").filename == "my run.v2.csv"


@pytest.mark.parametrize(
    "first, second, same",
    [
        ("csv", {"csv": {"filename": "metrics.csv"}}, True),
        (CSVLogger(), "csv(filename=metrics.csv)", True),
        (CSVLogger("a.csv"), CSVLogger("a.csv"), True),
        ("jsonl", {"jsonl": {"filename": "metrics.jsonl"}}, True),
        (CSVLogger("a.csv"), CSVLogger("b.csv"), False),
        (MemoryLogger(), MemoryLogger(), False),
    ],
)
def test_no_two_write_one_file(tmp_path, first, second, same):
    def make():
        return hocket.Trainer(
            model=torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
            train_data=[(torch.ones(1, 1), torch.ones(1, 1))], folder=tmp_path, loggers=[first, second],
        )  # fmt: skip

    if same:
        with pytest.raises(ValueError, match=r"twice\. Both have the same"):
            make()
    else:
        make().close()


def test_pandas_reads_it(state_in, tmp_path):
    pandas = pytest.importorskip("pandas")
    logger = CSVLogger()
    for batch in range(1, 4):
        logger.log_metrics(state_in(tmp_path, batch), {"loss": 1 / batch, "high": math.inf})
    logger.close(state_in(tmp_path))
    table = pandas.read_csv(tmp_path / "metrics.csv")
    assert table["loss"].tolist() == [1, 1 / 2, 1 / 3] and table["high"].tolist() == [math.inf] * 3
    assert table["sample"].tolist() == [4, 8, 12]


@pytest.mark.long
def test_a_killed_run_has_each_line_once(killed_and_resumed, tmp_path):
    losses = killed_and_resumed("csv", patience=0.0)
    written = rows(tmp_path / "run" / "metrics.csv")
    assert [(int(row["batch"]), float(row["train/loss"])) for row in written if row["train/loss"]] == losses


def test_lines_after_the_checkpoint_are_removed_and_their_columns(state_in, tmp_path):
    logger, resumed = CSVLogger(), CSVLogger()
    logger.log_metrics(state_in(tmp_path, 1), {"a": 1.0})
    saved = logger.state_dict()
    logger.log_metrics(state_in(tmp_path, 2), {"b": 2.0})
    logger.close(state_in(tmp_path))
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,0,1")  # a line that a killed process left incomplete
    resumed.load_state_dict(saved)
    resumed.fit_start(state_in(tmp_path, 1))
    resumed.log_metrics(state_in(tmp_path, 2), {"a": 3.0})
    resumed.close(state_in(tmp_path))
    assert [(row["batch"], row["a"]) for row in rows(tmp_path / "metrics.csv")] == [("1", "1.0"), ("2", "3.0")]
    assert "b" not in rows(tmp_path / "metrics.csv")[0]


def test_a_changed_file_loses_no_line(state_in, tmp_path):
    logger, resumed = CSVLogger(), CSVLogger()
    logger.log_metrics(state_in(tmp_path, 1), {"a": 1.0})
    saved = logger.state_dict()
    logger.log_metrics(state_in(tmp_path, 2), {"a": 2.0})
    logger.close(state_in(tmp_path))
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().replace("1.0", "9.0"))
    resumed.load_state_dict(saved)
    resumed.fit_start(state_in(tmp_path, 1))
    assert [row["a"] for row in rows(path)] == ["9.0", "2.0"]


def test_the_file_of_an_earlier_run_is_kept(state_in, tmp_path, capsys):
    for value in (1.0, 2.0):
        logger = CSVLogger()
        logger.log_metrics(state_in(tmp_path, 1), {"a": value})
        logger.close(state_in(tmp_path))
    assert rows(tmp_path / "metrics.csv")[0]["a"] == "2.0"
    assert rows(tmp_path / "metrics.earlier-1.csv")[0]["a"] == "1.0"
    assert "kept in metrics.earlier-1.csv" in capsys.readouterr().err
