"""What Trackio reads from its database."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from hocket_loggers import TrackioLogger
from hocket_testkit import LoggerConformance

if importlib.util.find_spec("trackio") is None:  # importing it would settle where its database is
    pytest.skip("trackio is not installed", allow_module_level=True)

POSITION = {"epoch", "sample", "token", "seconds", "step", "timestamp"}


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory):
    """Trackio reads the place of its database when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trackio")
        patch.setenv("TRACKIO_DIR", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


def rows(name):
    import trackio

    (run,) = [run for run in trackio.Api().runs("hocket") if run.name.startswith(name)]
    return run, trackio.SQLiteStorage.get_logs("hocket", run.name, run_id=run.id)


def values(name, metric):
    return [(row["step"], row[metric]) for row in rows(name)[1] if metric in row]


def test_every_record(state_in, tmp_path, database):
    logger = TrackioLogger()

    def at(batch):
        return state_in(tmp_path, batch, name="records")

    logger.log_hyperparameters(at(0), {"lr": 0.1, "algorithms": {"ema": {"half_life": "50ba"}}})
    logger.log_metrics(at(1), {"train/loss": 0.1 + 0.2, "epoch": 5})
    logger.log_metrics(at(2), {"train/loss": math.nan, "high": math.inf})
    image = torch.randint(256, (3, 4, 5), dtype=torch.uint8)
    logger.log_images(at(2), "samples", [image])
    logger.log_table(at(2), "generated", ["text", "score"], [["a|b", 0.5], [None, 1]])
    logger.log_text(at(2), "texts/first", "# A title")
    logger.log_histogram(at(2), "weights", [1, 0, 2.5], [-1.0, 0.0, 0.5, 2.0])
    (tmp_path / "file.txt").write_text("content")
    logger.log_artifact(at(2), "a file", tmp_path / "file.txt")
    logger.close(at(2))

    run, found = rows("records")
    assert run.config["algorithms"] == {"ema": {"half_life": "50ba"}}
    (first, (step, value)) = values("records", "train/loss")
    assert first == (1, 0.1 + 0.2) and step == 2 and math.isnan(value)
    assert values("records", "high") == [(2, math.inf)] and values("records", "metric/epoch") == [(1, 5)]
    assert all(row["sample"] == 4 * row["step"] for row in found)
    from PIL import Image

    (samples,) = [row["samples/0"] for row in found if "samples/0" in row]
    with Image.open(database / "media" / samples["file_path"]) as opened:
        assert opened.size == (5, 4) and opened.convert("RGB").getpixel((0, 0)) == tuple(image[:, 0, 0].tolist())
    objects = {name: value["_value"] for row in found for name, value in row.items() if "_value" in str(value)}
    assert objects["generated"] == [{"text": "a|b", "score": 0.5}, {"text": None, "score": 1}]
    assert objects["texts/first"] == "# A title"
    (histogram,) = [row["weights"] for row in found if "weights" in row]
    assert histogram["values"] == [1, 0, 2.5] and histogram["bins"] == [-1, 0, 0.5, 2]
    assert any(file.read_bytes() == b"content" for file in database.rglob("*") if file.is_file())


def test_a_killed_run_continues_and_has_each_value_once(killed_and_resumed):
    losses = killed_and_resumed("trackio", patience=3.0)
    assert values("run-", "train/loss") == losses


class TestTrackio(LoggerConformance):
    def make(self):
        return TrackioLogger()

    def written(self, logger, folder):
        import trackio

        runs = [run for run in trackio.Api().runs("hocket") if run.name.startswith(f"{folder.name}-")]
        found = {}
        for row in trackio.SQLiteStorage.get_logs("hocket", runs[-1].name, run_id=runs[-1].id):
            for name in row.keys() - POSITION:
                found.setdefault(name, []).append(float(row[name]))
        return found
