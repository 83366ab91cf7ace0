"""A logger that writes a file of JSON lines, and beside it what a report shows of the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.basics.run_files import strict
from hocket.errors import WrongValue
from hocket.hookspecs.logger import Logger, check_filename
from hocket.hookspecs.ticking import Ticking
from hocket.plugins.delivery import RowsLostError
from hocket.state.state import State
from hocket_loggers.media import Media
from hocket_loggers.resumable_lines import LinesFile
from hocket_loggers.run_summary import RunSummary

#: Between two times of writing. Lines that are written together take a fifth of the time.
_SECONDS = 0.1


class JSONLinesLogger(Logger):
    """Write ``metrics.jsonl`` in the run's folder: one JSON object per line; and images, tables, texts and histograms.

    Each line has ``epoch``, ``batch``, ``sample``, ``token`` and ``seconds``, and the values by name (a metric named ``epoch``
    becomes ``metric/epoch``). The first line of a run has its ``hyperparameters`` and the identity of the ``run``.

    A line is written at once, unless others were written less than 0.1 seconds ago: then a thread writes it within that time.
    A killed run loses only lines that wait; the last line may be incomplete, and is removed later.

    ``media/metrics.jsonl`` has a line for each image, table, text and histogram; images are PNG files beside it. A call writes
    at most 16 images of 1,024 × 1,024 pixels, 100 rows or 20,000 characters, and a run 100 MB of images; lines have the number
    ``omitted``.
    ``summary.json`` has the state of the run, its plan, the software and the costs of plug-ins, as of the last start or end of
    a fit. Evaluations after a fit add their values.

    A fit that resumes from a checkpoint truncates the files to their length at that checkpoint, so that no line appears twice.
    Nothing is removed if it is another file, or was changed since. A file of an earlier run is kept as
    ``metrics.earlier-1.jsonl``. With ``all_ranks``, ranks other than 0 write ``metrics.rank1.jsonl`` and so on. JSON has no
    non-finite numbers: they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python and
    JavaScript can convert to numbers.

    Args:
        filename: the name of the file within the run's folder, which ends with ``.jsonl``.

    Raises:
        ValueError: the name is a path, is hidden, or ends with something else.

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

    synchronous = True  # a checkpoint records the length of the files

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        check_filename("jsonl", filename, ".jsonl")
        self.filename = filename
        self._lines, self._media, self._summary = LinesFile(), Media(), RunSummary()
        #: Lines that are not yet written, with their values; and when a line is to be written at once.
        self._waiting: list[tuple[dict[str, Any], Mapping[str, float]]] = []
        self._due = 0.0
        self._ticking = Ticking(_SECONDS, self._flush, "jsonl")
        self._lock: threading.Lock | None = None  # made with the file, because it cannot be pickled
        #: What went wrong in a call that cannot raise, until the next one that can.
        self._lost: RowsLostError | None = None
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Write the waiting lines, and return the lengths of the files and their checksums."""
        self._flush()
        media = self._media.state_dict()
        return self._lines.state_dict() | {"fits": self._summary.fits()} | ({"media": media} if media else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore lengths and checksums; the next fit continues the files from there."""
        if unknown := sorted(state_dict.keys() - {"size", "sum", "media", "fits"}):
            raise WrongValue(
                f"The state of a JSONLinesLogger has the keys size, sum, media and fits, but was given {unknown}."
            )
        self._lines.load_state_dict(state_dict)
        self._media.load_state_dict(state_dict.get("media", {}))
        self._summary = RunSummary(**state_dict.get("fits", {}))
        self._resumed = True

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """Write a line ``{"hyperparameters": …, "run": …}``, unless the file has one of this run."""
        self._truncate(state)
        if self._lines.size and self._path(state).exists():
            return
        self._flush()
        self._open(state)
        self._lines.write({"hyperparameters": strict(parameters), "run": state.run.id})
        self._raise()

    def fit_start(self, state: State) -> None:
        """Begin the summary of the run."""
        self._truncate(state)
        self._summary.begin(self._path(state), state)

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Write a line with the position and the values."""
        line = _position(state)
        if line.keys().isdisjoint(metrics):
            line.update(metrics)
        else:
            line |= {f"metric/{name}" if name in line else name: value for name, value in metrics.items()}
        self._open(state)
        assert self._lock is not None
        with self._lock:
            self._waiting.append((line, metrics))
        if time.monotonic() >= self._due:
            self._flush()
        self._raise()
        self._ticking.start()

    def log_images(self, state: State, name: str, images: Sequence[Any]) -> None:
        """Write PNG files, and a line that names them. Raises ValueError for other shapes than (C, H, W) and (H, W)."""
        self._media.images(self._path(state), state.run.id, {"images": name, **_position(state)}, images)

    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a line with the first rows."""
        self._media.table(self._path(state), state.run.id, {"table": name, **_position(state)}, columns, rows)

    def log_text(self, state: State, name: str, text: str) -> None:
        """Write a line with the text."""
        self._media.text(self._path(state), state.run.id, {"text": name, **_position(state)}, text)

    def log_histogram(self, state: State, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """Write a line with counts and edges."""
        line = {"histogram": name, **_position(state), "counts": list(counts), "edges": list(edges)}
        self._media.write(self._path(state), state.run.id, line)

    def after_fit(self, state: State) -> None:
        """Write the waiting lines and the summary of the run."""
        self._flush()
        self._summary.end(state, "finished")
        self._raise()
        self._lines.check()

    def eval_standalone_end(self, state: State) -> None:
        """Write the waiting lines, and add the values to the summary of the run."""
        self._flush()
        self._summary.evaluated(self._path(state), state)
        self._raise()

    def exception(self, state: State) -> None:
        """Write the waiting lines and the summary of the run, which names the exception."""
        self._flush()
        self._summary.end(
            state, "interrupted" if isinstance(state.exception, KeyboardInterrupt | SystemExit) else "failed"
        )

    def close(self, state: State) -> None:
        """Close the files; the next write opens them again."""
        self._ticking.stop()
        self._flush()
        self._lines.close()
        self._media.close()
        self._raise()

    def _truncate(self, state: State) -> None:
        """Remove lines written after the checkpoint that the run resumes from."""
        if self._resumed:
            path = self._path(state)
            self._lines.truncate(path, state.run.id)
            self._media.truncate(path, state.run.id)
            self._resumed = False

    def _path(self, state: State) -> Path:
        path = state.run_folder / self.filename
        rank = state.strategy.rank
        return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path

    def _open(self, state: State) -> None:
        if not self._lines.is_open:
            self._lock = threading.Lock()
            self._lines.open(self._path(state), state.run.id)

    def _flush(self) -> None:
        """Write the waiting lines; `_raise` reports those that cannot be written."""
        if self._lock is not None:
            with self._lock:
                self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        lines = [line for line, _ in waiting]
        try:
            self._lines.write(*lines)
        except OSError:
            self._lost = self._write_what_fits(lines)
        for _, metrics in waiting:
            self._summary.add(metrics)
        self._due = time.monotonic() + _SECONDS

    def _write_what_fits(self, lines: Sequence[dict[str, Any]]) -> RowsLostError | None:
        for number, line in enumerate(lines):
            try:
                self._lines.write(line)
            except OSError as error:
                return RowsLostError(error, len(lines) - number + (self._lost.rows if self._lost else 0))
        return self._lost

    def _raise(self) -> None:
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost


def _position(state: State) -> dict[str, Any]:
    now = state.timestamp
    seconds = round(now.seconds, 6)
    return {"epoch": now.epoch, "batch": now.batch, "sample": now.sample, "token": now.token, "seconds": seconds}
