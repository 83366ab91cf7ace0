"""States for loggers to write, a run that is killed and resumed in processes of its own, and a server."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.basics.timestamp import Timestamp

#: Trains 20 batches with a checkpoint after every 8, and is killed by signal 9 after 14 if it is told so.
_PROGRAM = """
import os, signal, sys, time
import torch
import hocket, hocket_loggers

class Kill(hocket.Callback):
    def batch_end(self, state):
        if state.timestamp.batch == 14:
            deliveries = state.bus._deliveries.values()
            while not all(each._idle() for each in deliveries):
                time.sleep(0.01)
            time.sleep({patience})  # vendors write from threads of their own
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(20)]
    with hocket.Trainer(
        model=torch.nn.Linear(3, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", train_data=batches, device="cpu",
        duration="1ep", log_every="1ba", seed=3, folder={folder!r}, run_name="run", resume="auto",
        checkpoints=hocket.Checkpoints({folder!r} + "/checkpoints", every="8ba"),
        loggers=["jsonl", {logger!r}], callbacks=[Kill()] if "kill" in sys.argv else [],
    ) as trainer:
        for delivery in trainer.state.bus._deliveries.values():
            delivery._deadline = min(delivery._deadline, {deadline})
        trainer.fit()
"""


@pytest.fixture
def state_in() -> Callable[..., Any]:
    """Returns a function that makes a state with what loggers read of it."""

    def make(folder: Path, batch: int = 0, name: str = "run", run: str = "0123456789abcdef" * 2) -> Any:
        identity = SimpleNamespace(id=run, name=name)
        now = Timestamp(epoch=batch // 10, batch=batch, sample=4 * batch, seconds=batch / 8)
        return SimpleNamespace(run_folder=folder, run_name=name, run=identity, timestamp=now)

    return make


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the clock of TensorBoard's event files forward where the logger would wait for the next second."""
    waited = [0.0]
    clock = SimpleNamespace(time=lambda: time.time() + sum(waited), sleep=waited.append)
    monkeypatch.setattr("hocket_loggers.tensorboard.time", clock)
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)


@pytest.fixture
def killed_and_resumed(tmp_path: Path) -> Callable[..., list[tuple[int, float]]]:
    """Returns a function that trains with a logger, kills and resumes it, and returns batches and losses of the jsonl."""

    def run(logger: Any, patience: float) -> list[tuple[int, float]]:
        _run(tmp_path, "kill", -9, logger=logger, patience=patience)
        _run(tmp_path, "resume", 0, logger=logger, patience=patience)
        return _losses(tmp_path)

    return run


@pytest.fixture
def run_against(tmp_path: Path) -> Callable[..., None]:
    """Returns a function that trains with a logger whose server never answers, and expects that the process ends."""

    def run(logger: Any, environment: dict[str, str]) -> None:
        said = _run(tmp_path, "train", 0, environment, logger=logger, deadline=2.0)
        assert re.search(r"20 rows( and \d+ events?)? dropped", said) or "more may not have arrived" in said, said
        assert len(_losses(tmp_path)) == 20

    return run


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def _run(
    folder: Path, argument: str, expected: int, environment: dict[str, str] | None = None, *, logger: Any,
    patience: float = 0.0, deadline: float = 30.0,
) -> str:  # fmt: skip
    program = folder / "program.py"
    program.write_text(_PROGRAM.format(folder=str(folder), logger=logger, patience=patience, deadline=deadline))
    done = subprocess.run(
        [sys.executable, str(program), argument],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        cwd=folder, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == expected, done.stderr
    return done.stderr


def _losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [(row["batch"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert [batch for batch, _ in losses] == list(range(1, 21))
    return losses


@pytest.fixture
def chat():
    """A server on this machine that takes messages."""
    server = _Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class _Server(http.server.HTTPServer):
    """Keeps the bodies, and answers with the next of `answers`, or 200."""

    def __init__(self) -> None:
        self.answers, self.bodies = [], []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/secret"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""
