"""benchmarks/gpu.py, which is made to run on machines that nobody has tried it on: parts, results, failures, resuming."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("gpu", FOLDER / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_about", lambda environment: {"gpu": "no GPU"})
    return module


def test_parts_that_are_done_are_skipped_and_one_that_fails_stops_none(gpu: Any, monkeypatch, tmp_path, capsys) -> None:
    ran: list[str] = []

    def run(name: str, arguments: Any, environment: Any, limit: float) -> dict[str, Any]:
        ran.append(name)
        failed = name == "copies" and ran.count(name) == 1
        return (
            {"status": "failed: no", "traceback": "Error: no"} if failed else {"status": "done", "rows": [["a"], ["1"]]}
        )

    monkeypatch.setattr(gpu, "_run_apart", run)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path / "r.json")])
    assert gpu.main() == 1 and ran == list(gpu.PARTS)
    assert "failed: no" in capsys.readouterr().out
    assert gpu.main() == 0 and ran == [*gpu.PARTS, "copies"]
    sys.argv += ["--only", "fsdp"]
    assert gpu.main() == 0 and ran[-1] == "fsdp" and len(ran) == len(gpu.PARTS) + 2


def test_all_parts_fit_into_the_time_there_is(gpu: Any) -> None:
    assert sum(limit for _, limit in gpu.PARTS.values()) <= gpu.TOTAL


@pytest.mark.long
def test_a_part_runs_in_a_process_that_finds_hocket_by_path(gpu: Any, monkeypatch, tmp_path, capsys) -> None:
    results = tmp_path / "r.json"
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--device", "cpu", "--toy", "--only", "auto-microbatch", "--results", str(results)]
    )
    assert gpu.main() == 0
    assert json.loads(results.read_text())["parts"]["auto-microbatch"]["rows"][1][:3] == ["32", "13 samples", "11"]
    assert "| 32 | 13 samples | 11 |" in capsys.readouterr().out
