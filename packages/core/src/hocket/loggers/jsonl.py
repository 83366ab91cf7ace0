"""A file of JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hocket.logger import Logger
from hocket.state import State


class JSONLinesLogger(Logger):
    """Writes ``metrics.jsonl`` in the run's folder: one JSON object per line.

    Each line has ``epoch``, ``batch``, ``sample``, ``token`` and ``seconds``, and the values by name (``metric/epoch`` for one
    that would be ``epoch``); the first line of a run has its ``hyperparameters`` alone. Lines are written through at once, so a
    killed run loses at most the line under way, of which what is there is removed when a later run appends. JSON knows no
    numbers that are not finite: these are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, which Python's and
    JavaScript's conversions to numbers read.

    Args:
        filename: the name of the file within the run's folder.
    """

    synchronous = True  # what a checkpoint counts is in the file

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self.filename = filename
        self._file: IO[str] | None = None

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """One line, ``{"hyperparameters": …}``."""
        self._write(state, {"hyperparameters": _strict(parameters)})

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """One line."""
        now = state.timestamp
        line: dict[str, Any] = {"epoch": now.epoch, "batch": now.batch, "sample": now.sample, "token": now.token}
        line["seconds"] = round(now.seconds, 6)
        line |= {f"metric/{name}" if name in line else name: value for name, value in metrics.items()}
        self._write(state, line)

    def close(self, state: State) -> None:
        """Closes the file; it is opened again when there is more to write."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, state: State, line: Mapping[str, Any]) -> None:
        if self._file is None:
            path = state.run_folder / self.filename
            _mend(path)
            self._file = path.open("a", encoding="utf-8")
        try:
            text = _encode(line)
        except ValueError:  # NaN and infinity, which are rare
            text = _encode(_strict(line))
        self._file.write(text + "\n")
        self._file.flush()


_encode = json.JSONEncoder(allow_nan=False, default=str).encode


def _strict(value: Any) -> Any:
    """The same with nothing in it that is not JSON, but for objects of other types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_strict(item) for item in value]
    return value


def _mend(path: Path) -> None:
    """End the file with a whole line, where a killed run left a part of one."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            try:
                json.loads(content[whole:])
            except ValueError:
                file.truncate(whole)
            else:
                file.write(b"\n")  # only the end of the line was missing
