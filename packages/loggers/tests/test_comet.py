"""What stands in Comet's offline archives."""

from __future__ import annotations

import csv
import io
import json
import math
import zipfile

import pytest
import torch
from PIL import Image

from hocket_loggers import CometLogger
from hocket_testkit import LoggerConformance

pytest.importorskip("comet_ml")

POSITION = {"sample", "token", "seconds"}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")


def messages(folder):
    """The messages of all archives and their files, oldest archive first."""
    for archive in sorted((folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime):
        with zipfile.ZipFile(archive) as opened:
            assert json.loads(opened.read("experiment.json"))["offline_id"] == archive.name[:32]
            for line in opened.read("messages.json").decode().splitlines():
                message = json.loads(line)
                file = message["payload"].get("file_path")
                yield message["type"], message["payload"], opened.read(file) if file else b""


def values(folder, name):
    metrics = [payload["metric"] for kind, payload, _ in messages(folder) if kind == "metric_msg"]
    return [(each["step"], float(each["metricValue"])) for each in metrics if each["metricName"] == name]


def test_every_record(state_in, tmp_path):
    logger = CometLogger(online=False)
    logger.log_hyperparameters(state_in(tmp_path), {"lr": 0.1, "algorithms": {"ema": {"half_life": "50ba"}}})
    logger.log_metrics(state_in(tmp_path, 1), {"train/loss": 0.1 + 0.2, "sample": 5})
    logger.log_metrics(state_in(tmp_path, 2), {"train/loss": math.nan})
    image = torch.randint(256, (3, 4, 5), dtype=torch.uint8)
    logger.log_images(state_in(tmp_path, 2), "samples", [image, torch.rand(1, 2, 2).bfloat16()])
    logger.log_table(state_in(tmp_path, 2), "generated", ["text", "score"], [["a|b", 0.5], ["two\nlines", 1]])
    logger.log_text(state_in(tmp_path, 2), "texts/first", "# A title")
    logger.log_histogram(state_in(tmp_path, 2), "weights", [1, 0, 2.5], [-1.0, 0.0, 0.5, 2.0])
    (tmp_path / "file.txt").write_text("content")
    logger.log_artifact(state_in(tmp_path, 2), "files", tmp_path / "file.txt")
    logger.close(state_in(tmp_path, 2))

    (first, (step, value)) = values(tmp_path, "train/loss")
    assert first == (1, 0.1 + 0.2) and step == 2 and math.isnan(value)
    assert values(tmp_path, "metric/sample") == [(1, 5)] and values(tmp_path, "sample") == [(1, 4), (2, 8)]
    found = list(messages(tmp_path))
    parameters = [payload["param"] for kind, payload, _ in found if kind == "parameter_msg"]
    assert {"lr": 0.1, "algorithms/ema/half_life": "50ba"}.items() <= {
        each["paramName"]: each["paramValue"] for each in parameters
    }.items()
    uploads = [(payload["additional_params"], data) for kind, payload, data in found if kind == "file_upload"]
    files = {about.get("fileName") or about["figName"]: data for about, data in uploads}
    with Image.open(io.BytesIO(files["samples/0"])) as opened:
        assert opened.size == (5, 4) and opened.convert("RGB").getpixel((0, 0)) == tuple(image[:, 0, 0].tolist())
    table = list(csv.reader(io.StringIO(files["generated-2.csv"].decode())))
    assert table == [["text", "score"], ["a|b", "0.5"], ["two\nlines", "1"]]
    assert b"# A title" in files.values()
    assert json.loads(files["weights-2.json"]) == {"counts": [1, 0, 2.5], "edges": [-1.0, 0.0, 0.5, 2.0]}
    assert files["files/file.txt"] == b"content"
    assert not list((tmp_path / "comet").glob("*.unfinished"))


def test_a_killed_run_continues_and_has_each_value_once(killed_and_resumed, tmp_path):
    losses = killed_and_resumed({"comet": {"online": False}}, patience=3.0)
    assert values(tmp_path / "run", "train/loss") == losses
    assert len(list((tmp_path / "run" / "comet").glob("*.zip"))) == 2, "that of the killed process was completed"


def test_the_process_ends_though_the_server_never_answers(silent_server, run_against):
    run_against({"comet": {}}, {"COMET_URL_OVERRIDE": f"{silent_server}/clientlib/", "COMET_API_KEY": "0" * 25})


class TestComet(LoggerConformance):
    def make(self):
        return CometLogger(online=False)

    def written(self, logger, folder):
        found = {}
        for kind, payload, _ in messages(folder):
            metric = payload.get("metric", {})
            if kind == "metric_msg" and metric["metricName"] not in POSITION | {"process duration"}:
                found.setdefault(metric["metricName"], []).append(float(metric["metricValue"]))
        return found
