"""A file that says whether a run is alive."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from hocket.basics import safe_files
from hocket.help import warn
from hocket.hookspecs.callback import Callback
from hocket.hookspecs.ticking import Ticking
from hocket.state.state import State


class Heartbeat(Callback):
    """Keep a JSON file whose age shows whether training advances: ``heartbeat.json`` in the run's folder.

    A thread replaces the file every ``seconds`` seconds, if a batch of training or evaluation has ended since the last time.
    So the file of a run that hangs, or whose process was killed, stays ``"running"`` and grows older than ``seconds`` plus
    the longest batch, checkpoint or wait for data. The file is replaced at once when a fit begins and ends, and after an
    exception. It is never incomplete. Rank 0 writes it.

    * ``status``: ``"running"``; ``"finished"``: the fit is over; ``"interrupted"``: by Control-C or a signal; ``"failed"``
    * ``error``: type and message of the exception, or null
    * ``time``, ``advanced``: when it was written, and when a batch was last noticed to have ended; seconds since 1970
    * ``seconds``: the interval
    * ``epoch``, ``batch``, ``sample``: the position in training
    * ``evaluating``: the label of the current evaluation set, or null
    * ``run``, ``name``, ``host``, ``pid``: the run's id and name, and the process

    Args:
        seconds: the interval.
        path: the file; None for ``heartbeat.json`` in the run's folder.

    Raises:
        ValueError: ``seconds`` is not above 0.

    Example:
        >>> import hocket, json, torch
        >>> from hocket_insight.callbacks.heartbeat import Heartbeat
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu", folder="runs",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 10, callbacks=[Heartbeat()],  # or callbacks=["heartbeat"]
        ... )
        >>> result = trainer.fit("1ep")
        >>> beat = json.loads((result.run_folder / "heartbeat.json").read_text())
        >>> beat["status"], beat["batch"]
        ('finished', 10)
    """

    def __init__(self, seconds: float = 30.0, path: str | Path | None = None) -> None:
        self._seconds, self._path = seconds, None if path is None else Path(path)
        self._ticking = Ticking(seconds, self._beat, "heartbeat")
        self._file = Path()
        self._state: State | None = None
        #: Batches of evaluations so far; the place in training that was noted last, and when.
        self._evaluated = 0
        self._place: tuple[int, int, int] | None = None
        self._advanced = 0.0

    def fit_start(self, state: State) -> None:
        """Write the file, and start the thread."""
        if state.strategy.rank:
            return
        self._file = state.run_folder / "heartbeat.json" if self._path is None else self._path
        self._state, self._place = state, None
        if not self._ticking.start():
            self._state = None

    def eval_batch_end(self, state: State) -> None:
        """Note that the evaluation advances; the thread reads the position of training itself, which costs no step."""
        self._evaluated += 1

    def after_fit(self, state: State) -> None:
        """Note the end."""
        self._end(state, "finished")

    def exception(self, state: State) -> None:
        """Note the exception."""
        ends = isinstance(state.exception, KeyboardInterrupt | SystemExit)
        self._end(state, "interrupted" if ends else "failed")

    def close(self, state: State) -> None:
        """End the thread."""
        self._ticking.stop()
        self._state = None

    def _beat(self) -> None:
        if self._state is not None and self._advances(self._state):
            self._write(self._state, "running")

    def _advances(self, state: State) -> bool:
        now, before = state.timestamp, self._place
        self._place = now.epoch, now.batch, self._evaluated
        if advances := self._place != before:
            self._advanced = time.time()
        return advances

    def _end(self, state: State, status: str) -> None:
        self._ticking.stop()
        if self._state is not None:
            self._advances(state)
            try:
                self._write(state, status)
            except OSError as error:
                warn(f"heartbeat did not write that the run is {status}: {error}")

    def _write(self, state: State, status: str) -> None:
        now, error = state.timestamp, state.exception
        beat: dict[str, Any] = {
            "status": status, "error": f"{type(error).__name__}: {error}" if error is not None else None,
            "time": time.time(), "advanced": self._advanced, "seconds": self._seconds,
            "epoch": now.epoch, "batch": now.batch, "sample": now.sample, "evaluating": state.eval_label,
            "run": state.run.id, "name": state.run.name, "host": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        self._file.parent.mkdir(parents=True, exist_ok=True)
        safe_files.replace(self._file, json.dumps(beat) + "\n")
