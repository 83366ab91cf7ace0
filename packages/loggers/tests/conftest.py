"""States for loggers to write, a run that is killed and resumed in processes of its own, and a server."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.timestamp import Timestamp

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
def killed_and_resumed(tmp_path: Path) -> Callable[..., list[tuple[int, float]]]:
    """Returns a function that trains with a logger, kills and resumes it, and returns batches and losses of the jsonl."""

    def run(logger: Any, patience: float = 1.0) -> list[tuple[int, float]]:
        program = tmp_path / "program.py"
        program.write_text(_PROGRAM.format(folder=str(tmp_path), logger=logger, patience=patience))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for argument, expected in (("kill", -9), ("resume", 0)):
            done = subprocess.run(
                [sys.executable, str(program), argument], env=environment, cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == expected, done.stderr
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        losses = [(row["batch"], row["train/loss"]) for row in rows if "train/loss" in row]
        assert [batch for batch, _ in losses] == list(range(1, 21))
        return losses

    return run


@pytest.fixture
def chat():
    """A server on this machine that takes messages."""
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class _Server(http.server.ThreadingHTTPServer):
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
