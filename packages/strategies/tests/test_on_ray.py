"""Trials of a sweep on the nodes of a Ray cluster. `nox -s ray` installs it; elsewhere all of this is skipped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from hocket_strategies.on_ray import main  # noqa: E402

ON_RAY = f"{sys.executable} -m hocket_strategies.on_ray"
TASK = """
import time, torch

def loader(seconds: float = 0.0):
    return Slow([(torch.ones(4, 3), torch.ones(4, 1))] * 10, seconds)

class Slow(list):
    def __init__(self, batches, seconds):
        super().__init__(batches)
        self.seconds = seconds
    def __iter__(self):
        for each in super().__iter__():
            time.sleep(self.seconds)
            yield each
"""
CONFIG = """
model: {torch.nn:Linear: {in_features: 3, out_features: 1}}
loss: torch.nn:MSELoss
train_data: {ray_mine:loader: {seconds: 0.2}}
eval_data: {test: ray_mine:loader}
optimizer: sgd(lr=0.1)
checkpoints: {folder: none, every: 1ba}
duration: 1ep
device: cpu
seed: 7
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes with a processor each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=small)
    nodes.add_node(**{key: value for key, value in small.items() if key != "include_dashboard"})
    os.environ["RAY_ADDRESS"] = nodes.address
    yield
    del os.environ["RAY_ADDRESS"]
    nodes.shutdown()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("ray_mine.py").write_text(TASK)
    Path("c.yaml").write_text(CONFIG)
    return tmp_path


def sweep(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hocket", "sweep", "c.yaml", "optimizer.sgd.lr=0.1,0.01", "--metric", "test/loss"]
    command += ["--mode", "min", "--jobs", "2", "--prefix", ON_RAY, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def trials() -> list[dict[str, object]]:
    return json.loads(Path("runs/c-sweep/sweep.json").read_text())["trials"]


def test_trials_run_on_both_nodes_and_a_signal_reaches_them(cluster: None, folder: Path) -> None:
    """Two trials train at the same time, for which a node alone has too few processors."""
    first = sweep()
    checkpoints = [folder / f"runs/c-sweep/trial-00{number}/checkpoints" for number in (0, 1)]
    until = time.monotonic() + 120
    while not all(any(each.glob("ep*-ba*")) for each in checkpoints) and time.monotonic() < until:
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=120)
    assert [each["status"] for each in trials()] == ["interrupted"] * 2
    output = sweep().communicate(timeout=200)[0]
    assert [each["status"] for each in trials()] == ["finished"] * 2, output
    assert (folder / "runs/c-sweep/.sweep/trial-000.txt").read_text().count("a new run begins") == 1


def test_output_and_exit_code(cluster: None, folder: Path) -> None:
    program = "import os, sys; print(os.getcwd()); print('bad', file=sys.stderr); sys.exit(7)"
    done = subprocess.run([*ON_RAY.split(), sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (7, [str(folder), "bad"])
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert subprocess.run([*ON_RAY.split(), *killed]).returncode == 128 + signal.SIGKILL


def test_without_a_cluster_or_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(SystemExit):
        main(["--num-gpus", "1"])
    assert "there is no command" in capsys.readouterr().err
