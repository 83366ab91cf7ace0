"""One run of a sweep, in its own process: report its metric, stop if it is pruned, and write its result."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics import safe_files
from hocket.hookspecs.callback import Callback
from hocket.state.requests import Decision
from hocket.state.watching import check_name

if TYPE_CHECKING:
    from hocket.run.result import Result
    from hocket.state.state import State


class Trial(Callback):
    """Report the metric after each evaluation, and stop the run where the sweep's pruner says so.

    Args:
        file: written by the sweep: the metric, where to write the result, and how to reach the pruner.
    """

    def __init__(self, file: str) -> None:
        self._about = read(Path(file))
        self.pruned = False

    def fit_start(self, state: State) -> None:
        """Refuse a metric that no evaluation has, before training, and have the sweep end."""
        try:
            check_name(state, "The sweep", self._about["metric"])
        except ValueError as error:
            if state.strategy.rank == 0:
                write(Path(self._about["result"]), {"no_metric": str(error)})
            raise

    def eval_after_all(self, state: State) -> None:
        """Report the metric; the first rank decides."""
        about, value = self._about["prune"], state.metrics.get(self._about["metric"])
        if about is None or value is None or state.strategy.rank != 0 or math.isnan(value) or self.pruned:
            return
        from hocket_cli.sweeps.optuna import Study

        study = Study(Path(about["journal"]), about["mode"], about["pruner"])
        if study.report(about["trial"], float(value), state.timestamp.batch):
            self.pruned = True
            state.request(Decision.STOP, reason=f"the sweep prunes it at {self._about['metric']} {value:.6g}")

    def finish(self, result: Result, state: State) -> None:
        """Write the result, atomically, on one rank."""
        if state.strategy.rank == 0:
            metrics: dict[str, Any] = {name: float(value) for name, value in result.metrics.items()}
            write(Path(self._about["result"]), {"pruned": self.pruned, "metrics": metrics})


def note_plan(file: str, plan: str) -> None:
    """Write the plan into the file of the trial: its last line is not why the trial ended."""
    write(Path(file), {**read(Path(file)), "plan": plan})


def note_error(file: str, error: Exception) -> None:
    """Write the exception that ends this trial as its result, in one line; the first rank that fails does."""
    from hocket.errors import Mistake

    result = Path(read(Path(file))["result"])
    if not result.exists():
        said = str(error) if isinstance(error, Mistake) else f"{type(error).__name__}: {error}"
        write(result, {"error": " ".join(said.split())[:400]})


def end_with_sweep(file: str) -> None:
    """Have this process get SIGTERM when the sweep that started it is gone: it writes a checkpoint, for the next sweep.

    Not where another command, such as srun, started it.
    """
    sweep = read(Path(file))["sweep"]
    if os.getppid() != sweep:
        return

    def watch() -> None:
        while os.getppid() == sweep:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="sweep", daemon=True).start()


def read(file: Path) -> Any:
    """Read JSON that `write` wrote. Raises OSError and ValueError."""
    return safe_files.parsed(safe_files.content(file, 1 << 26, within=file.parent))


def write(file: Path, content: Any) -> None:
    """Write JSON atomically."""
    safe_files.replace(file, json.dumps(content, indent=1, allow_nan=True) + "\n")
