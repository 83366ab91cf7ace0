"""Every logger that needs no vendor passes the suite that authors of plug-ins inherit; the others do beside their tests."""

import csv
import io
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hocket_loggers import CSVLogger, TensorBoardLogger, WebhookLogger
from hocket_loggers.jsonl import JSONLinesLogger
from hocket_loggers.progress import ProgressLogger
from hocket_testkit import LoggerConformance

_NO_METRICS = dict.fromkeys(
    (
        "test_writes_down_what_is_logged",
        "test_goes_on_after_it_was_closed",
        "test_two_runs_do_not_mix",
        "test_values_that_are_not_finite",
    ),
    "it writes no metrics",
)


@pytest.mark.usefixtures("no_waiting")
class TestTensorBoard(LoggerConformance):
    def make(self):
        return TensorBoardLogger()

    def written(self, logger, folder):
        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


class TestCSV(LoggerConformance):
    def make(self):
        return CSVLogger()

    def written(self, logger, folder):
        values = {}
        with (folder / "metrics.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                for name, cell in list(row.items())[5:]:
                    if cell:
                        values.setdefault(name, []).append(float(cell))
        return values


class TestWebhook(LoggerConformance):
    exempt = _NO_METRICS | {"test_is_a_logger": "it sends messages on events"}

    def make(self):
        return WebhookLogger(self.url)

    @pytest.fixture(autouse=True)
    def _server(self, chat):
        self.url = chat.url


class TestProgress(LoggerConformance):
    exempt = {
        test: "without a terminal it prints what is evaluated, and the latest of the rest now and then"
        for test in (
            "test_writes_down_what_is_logged", "test_goes_on_after_it_was_closed", "test_two_runs_do_not_mix",
            "test_values_that_are_not_finite",
        )
    }  # fmt: skip

    def make(self):
        return ProgressLogger(io.StringIO())


class TestJSONLines(LoggerConformance):
    def make(self):
        return JSONLinesLogger()

    def written(self, logger, folder):
        values = {}
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            for name, value in json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")).items():
                if "/" in name:
                    values.setdefault(name, []).append(float(value))
        return values
