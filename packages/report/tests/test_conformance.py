"""The callback passes the suite for callbacks."""

from __future__ import annotations

import pytest

import hocket.testkit
from hocket_report import Report, vega


class TestReport(hocket.testkit.CallbackConformance):
    #: The Trainers of the suite have no logger.
    pytestmark = pytest.mark.filterwarnings("ignore:The report of this run was not written")

    @pytest.fixture(autouse=True)
    def _without_scripts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vega, "bundle", lambda: "")

    def make(self) -> Report:
        return Report()
