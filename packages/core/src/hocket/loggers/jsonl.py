"""A logger that writes a file of JSON lines."""

from __future__ import annotations

import errno
import json
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hocket.logger import Logger
from hocket.state import State


class JSONLinesLogger(Logger):
    """Write ``metrics.jsonl`` in the run's folder: one JSON object per line.

    Each line has ``epoch``, ``batch``, ``sample``, ``token`` and ``seconds``, and the values by name (a metric named ``epoch``
    becomes ``metric/epoch``). The first line of a run has its ``hyperparameters`` and the identity of the ``run``. Lines are
    written without buffering: a killed run loses at most the current line, and the incomplete line is removed later.

    A fit that resumes from a checkpoint truncates the file to its length at that checkpoint, so that no line appears twice.
    Nothing is removed if it is another file, or was changed since. A file of an earlier run is kept as
    ``metrics.earlier-1.jsonl``. With ``all_ranks``, ranks other than 0 write ``metrics.rank1.jsonl`` and so on. JSON has no
    non-finite numbers: they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python and
    JavaScript can convert to numbers.

    Args:
        filename: the name of the file within the run's folder.

    Example:
        >>> import hocket, json, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20, duration="1ep", loggers=["jsonl"],
        ... )
        >>> file = trainer.fit().run_folder / "metrics.jsonl"
        >>> [row["batch"] for row in map(json.loads, file.read_text().splitlines()) if "train/loss" in row]
        [10, 20]
    """

    synchronous = True  # a checkpoint records the length of the file

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self.filename = filename
        self._file: IO[bytes] | None = None
        #: Length and checksum of the file, or those recorded in the checkpoint.
        self._size = self._sum = 0
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file and its checksum."""
        return {"size": self._size, "sum": self._sum} if self._size else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore length and checksum; the next fit continues the file from there."""
        if unknown := sorted(state_dict.keys() - {"size", "sum"}):
            raise ValueError(f"The state of a JSONLinesLogger has the keys size and sum, but was given {unknown}.")
        self._close()
        self._size, self._sum, self._resumed = state_dict["size"], state_dict["sum"], True

    def fit_start(self, state: State) -> None:
        """Remove lines written after the checkpoint that the run resumes from."""
        if self._resumed and (path := self._path(state)).exists():
            with path.open("r+b") as file:
                if zlib.crc32(file.read(self._size)) == self._sum and file.tell() == self._size:
                    file.truncate()
        self._resumed = False

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """Write a line ``{"hyperparameters": …, "run": …}``."""
        self._write(state, {"hyperparameters": _strict(parameters), "run": state.run.id})

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Write a line with the position and the values."""
        now = state.timestamp
        line: dict[str, Any] = {"epoch": now.epoch, "batch": now.batch, "sample": now.sample, "token": now.token}
        line["seconds"] = round(now.seconds, 6)
        line |= {f"metric/{name}" if name in line else name: value for name, value in metrics.items()}
        self._write(state, line)

    def close(self, state: State) -> None:
        """Close the file; the next write opens it again."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self, state: State) -> Path:
        path = state.run_folder / self.filename
        rank = state.strategy.rank
        return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path

    def _write(self, state: State, line: Mapping[str, Any]) -> None:
        try:
            text = _encode(line)
        except ValueError:  # non-finite values, which are rare
            text = _encode(_strict(line))
        data = text.encode() + b"\n"
        if self._file is None:
            path = self._path(state)
            _keep(path, state.run.id)
            self._size, self._sum = _mend(path)
            self._file = path.open("ab", buffering=0)
        written = self._file.write(data)
        if written != len(data):  # the disk is full
            self._file.truncate(self._size)
            raise OSError(errno.ENOSPC, f"Only {written} of {len(data)} bytes could be written to {self._file.name}")
        self._size += len(data)
        self._sum = zlib.crc32(data, self._sum)


_encode = json.JSONEncoder(allow_nan=False, default=str).encode


def _strict(value: Any) -> Any:
    """Replace non-finite floats by strings and convert containers to JSON types. Objects of other types are unchanged."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_strict(item) for item in value]
    return value


def _keep(path: Path, run: str) -> None:
    """Rename the file if another run wrote it, in a folder that now belongs to this run."""
    try:
        with path.open("rb") as file:
            owner = json.loads(file.readline(1 << 20))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if owner == run:
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}.earlier-{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
    print(f"hocket: {path} belonged to an earlier run; its lines are kept in {kept.name}.", file=sys.stderr, flush=True)


def _mend(path: Path) -> tuple[int, int]:
    """Remove or complete the last line if a killed run left it incomplete. Return length and checksum of the file."""
    if not path.exists():
        return 0, 0
    with path.open("r+b") as file:
        content = file.read()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            try:
                json.loads(content[complete:])
            except ValueError:
                content = content[:complete]
                file.truncate(complete)
            else:
                content += b"\n"
                file.write(b"\n")  # only the line break was missing
    return len(content), zlib.crc32(content)
