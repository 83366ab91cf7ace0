"""One CSV file of all metrics."""

from __future__ import annotations

import csv
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hocket import Logger, State
from hocket.errors import WrongValue
from hocket.hookspecs.logger import check_filename
from hocket_loggers.resumable_lines import keep
from hocket_loggers.vendor_records import position


class CSVLogger(Logger):
    """Write ``metrics.csv`` in the run's folder: one line for each row of metrics, one column for each name.

    The first columns are ``batch``, ``epoch``, ``sample``, ``token`` and ``seconds``; a metric of such a name gets a column
    ``metric/epoch``. A cell is empty where a line has no value. A name that appears later adds a column, for which the file is
    replaced atomically. Non-finite values are written as ``nan``, ``inf`` and ``-inf``.

    A fit that resumes from a checkpoint removes the lines after it, so that no line appears twice. Nothing is removed if the
    lines before it were changed. A file of an earlier run is kept as ``metrics.earlier-1.csv``. A CSV file has no place for
    records other than metrics: the logger ``jsonl`` also writes hyperparameters.

    Args:
        filename: the name of the file within the run's folder, which ends with ``.csv``.

    Raises:
        ValueError: the name is a path, is hidden, or ends with something else.

    Example:
        >>> import csv, hocket, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20, duration="1ep", loggers=["csv"],
        ... )
        >>> file = trainer.fit().run_folder / "metrics.csv"
        >>> [row["batch"] for row in csv.DictReader(file.open()) if row["train/loss"]]
        ['10', '20']
    """

    synchronous = True  # a checkpoint records the number of lines

    def __init__(self, filename: str = "metrics.csv") -> None:
        check_filename("csv", filename, ".csv")
        self.filename = filename
        self._file: IO[str] | None = None
        self._columns: list[str] = []
        #: Number of lines and checksum of their values, or those recorded in the checkpoint.
        self._rows = self._sum = 0
        #: Whether this run has written the file, and whether lines after the checkpoint have to be removed.
        self._own = self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of lines and the checksum of their values."""
        return {"rows": self._rows, "sum": self._sum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both; the next fit continues the file from there."""
        if unknown := sorted(state_dict.keys() - {"rows", "sum"}):
            raise WrongValue(f"The state of a CSVLogger has the keys rows and sum, but was given {unknown}.")
        self._close()
        self._rows, self._sum = state_dict["rows"], state_dict["sum"]
        self._own = self._resumed = True

    def fit_start(self, state: State) -> None:
        """Remove lines written after the checkpoint that the run resumes from."""
        path = self._path(state)
        if self._resumed and path.exists():
            kept = list(_read(path))[: self._rows]
            if len(kept) == self._rows and _checksum(kept) == self._sum:
                _write(path, list(dict.fromkeys(name for row in kept for name in row)), kept)
        self._resumed = False

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Write a line with the position and the values."""
        row: dict[str, Any] = {"batch": state.timestamp.batch, **position(state)}
        row |= {f"metric/{name}" if name in row else name: value for name, value in metrics.items()}
        text = {name: repr(value) for name, value in row.items()}
        if self._file is None:
            self._open(state)
        if new := [name for name in text if name not in self._columns]:
            self._add(state, new)
        assert self._file is not None
        csv.DictWriter(self._file, self._columns, lineterminator="\n").writerow(text)
        self._file.flush()
        self._rows += 1
        self._sum = _checksum([text], self._sum)

    def close(self, state: State) -> None:
        """Close the file; the next line opens it again."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self, state: State) -> Path:
        return state.run_folder / self.filename

    def _open(self, state: State) -> None:
        path = self._path(state)
        if not self._own and path.exists():
            keep(path)
        rows = list(_read(path)) if path.exists() else []
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        _write(path, self._columns, rows)  # without a line that a killed process left incomplete
        self._rows, self._sum, self._own = len(rows), _checksum(rows), True
        self._file = path.open("a", newline="")

    def _add(self, state: State, columns: list[str]) -> None:
        self._close()
        path = self._path(state)
        self._columns += columns
        _write(path, self._columns, list(_read(path)))
        self._file = path.open("a", newline="")


def _read(path: Path) -> Iterator[dict[str, str]]:
    """Yield the complete lines, each without its empty cells."""
    with path.open(newline="") as file:
        text = file.read()
    lines = csv.reader(text[: text.rfind("\n") + 1].splitlines(keepends=True))
    columns = next(lines, [])
    for line in lines:
        yield {name: cell for name, cell in zip(columns, line, strict=False) if cell}


def _write(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    """Replace the file by one with these columns, atomically."""
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if columns:
            writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def _checksum(rows: list[dict[str, str]], start: int = 0) -> int:
    """Return a checksum of the values by name, which columns added later do not change."""
    for row in rows:
        start = zlib.crc32(repr(sorted(row.items())).encode(), start)
    return start
