"""benchmarks/gpu.py, which is made to run on machines that nobody has tried it on: parts, results, failures, resuming."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--results", str(tmp_path / "r.json")])
    assert gpu.main() == 1 and ran == list(gpu.PARTS)
    assert "failed: no" in capsys.readouterr().out
    assert gpu.main() == 0 and ran == [*gpu.PARTS, "copies"]
    sys.argv += ["--only", "fsdp"]
    assert gpu.main() == 0 and ran[-1] == "fsdp" and len(ran) == len(gpu.PARTS) + 2


def test_results_of_a_toy_are_not_those_of_the_parts(gpu: Any, monkeypatch, tmp_path) -> None:
    ran: list[str] = []
    monkeypatch.setattr(gpu, "_run_apart", lambda name, *how: ran.append(name) or {"status": "done", "rows": [["a"]]})
    for options in (["--toy"], ["--toy"], []):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--results", str(tmp_path / "r.json"), *options])
        assert gpu.main() == 0
    assert ran == [*gpu.PARTS, *gpu.PARTS]


@pytest.mark.parametrize(
    "said, errors, code",
    [
        ("", "No module named pytest", 1),
        ("FAILED tests/gpu/a.py::b\n1 failed, 3 passed", "", 1),
        ("no tests ran in 0.01s", "", 5),
        ("54 skipped in 1.00s", "", 0),
        ("", "", -11),
    ],
)
def test_tests_that_fail_or_do_not_run_are_not_done(gpu: Any, monkeypatch, said: str, errors: str, code: int) -> None:
    done = SimpleNamespace(stdout=said, stderr=errors, returncode=code)
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=lambda *a, **k: done))
    with pytest.raises(gpu.PartFailed, match=f"exit code {code}"):
        gpu.tests("cpu", True)
    done.stdout, done.returncode = "3 passed, 1 skipped in 1.00s", 0
    assert gpu.tests("cpu", True)[1] == [done.stdout]


@pytest.mark.parametrize(
    "then, status",
    [
        ("raise ValueError('no')", "failed: ValueError: no"),
        pytest.param("import time; time.sleep(60)", "stopped after 3 s", marks=pytest.mark.long),
        ("import os; os._exit(0)", "died without an exit code"),
        ("import os; os.kill(os.getpid(), 11)", "died with exit code -11"),
        ("import atexit, os; atexit.register(os._exit, 7)", "died with exit code 7"),
        ("pass", "done"),
    ],
)
def test_rows_of_a_part_that_ends_early_are_kept(gpu: Any, monkeypatch, tmp_path, then: str, status: str) -> None:
    """Of a part that raises, is stopped, ends the process, or is done before the process dies."""
    part = tmp_path / "part.py"
    part.write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import gpu\n"
        f"def part(device, toy):\n    rows = gpu.Rows([['head']])\n    rows.append(['a row'])\n    {then}\n    return rows\n"
        "gpu.PARTS['copies'] = part, 60\nsys.exit(gpu.main())\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(part))
    arguments = SimpleNamespace(device="cpu", toy=True)
    found = gpu._run_apart("copies", arguments, {**os.environ, "PYTHONPATH": ""}, 3.0 if "sleep" in then else 60.0)
    assert found["status"] == status and found["rows"] == [["head"], ["a row"]]
    results = {"parts": {"copies": found}}
    assert "| a row |" in gpu.markdown(results) and (status == "done" or status in gpu.markdown(results))


def test_a_contender_that_fails_is_no_result(gpu: Any, monkeypatch) -> None:
    class Fails:
        cases = ("bare",)

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def ask(self, **options: Any) -> Any:
            raise RuntimeError("it has no GPU")

        def close(self) -> None: ...

    monkeypatch.setattr(gpu, "Worker", Fails)
    with pytest.raises(gpu.PartFailed, match=r"hocket.* failed"):
        gpu.gpt2("cpu", True)


def test_without_a_gpu_it_says_what_to_type(gpu: Any, monkeypatch, tmp_path) -> None:
    none = SimpleNamespace(returncode=0, stdout="False")
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=lambda *a, **k: none))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path / "r.json")])
    with pytest.raises(SystemExit, match="--toy"):
        gpu.main()


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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_its_own_lines_make_an_environment_in_which_everything_runs(gpu: Any, tmp_path, pytestconfig) -> None:
    """The lines of its documentation, in an empty environment; all parts, at toy size."""
    if not any("gpu_benchmark" in argument for argument in pytestconfig.args):
        pytest.skip("takes minutes: nox -s long -- tests/test_gpu_benchmark.py")
    lines = [line.strip() for line in gpu.__doc__.splitlines() if line.startswith("    ")]
    assert [line.split()[0] for line in lines] == ["uv", "uv", "gpu-env/bin/python", "gpu-env/bin/python"]
    root, made = FOLDER.parent, tmp_path / "gpu-env"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for line in lines[:3]:
        words = line.replace("gpu-env", str(made)).split()
        words += ["--results", str(tmp_path / "r.json")] if "--toy" in words else []
        done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-5000:]}{done.stderr[-5000:]}"
    parts = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert list(parts) == list(gpu.PARTS) and {part["status"] for part in parts.values()} == {"done"}
    assert all("skipped" not in row[1] for name in ("resnet50", "gpt2") for row in parts[name]["rows"])
