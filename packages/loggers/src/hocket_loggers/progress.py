"""A progress bar on a terminal or in a notebook, or plain lines."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from hocket.basics import display, seeding
from hocket.hookspecs.logger import Logger
from hocket.loggers.console import by_set, line, output
from hocket.state.state import State

with seeding.preserved():  # importing rich draws a number from Python's global RNG
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
    from rich.table import Column


class ProgressLogger(Logger):
    """Show a progress bar with loss, speed and remaining time, or plain lines without a terminal or notebook.

    The bar covers the planned duration; a second bar appears during evaluation. It is drawn at most ten times a second;
    between drawings a batch costs one clock read. Evaluation results are always printed as a line. After a fit, the last
    lines say what was written and how to continue. Notebooks (Jupyter, VS Code, Colab) need no further package.

    Args:
        file: the file to print to; None for the notebook, or ``sys.stderr``.
        seconds: time between plain lines about training.

    Example:
        >>> import hocket, sys, torch
        >>> from hocket_loggers.progress import ProgressLogger
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, loggers=[ProgressLogger(file=sys.stdout)], device="cpu")
    """

    shows_only = True

    def __init__(self, file: IO[str] | None = None, seconds: float = 10.0) -> None:
        self._file = file
        self._seconds = seconds
        self._console: Console | None = None  # None outside of a fit or evaluation
        self._bar: Progress | None = None  # None without a terminal or notebook
        self._shown: Any = None  # IPython's handle of the bar's output in a notebook
        self._training: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._evaluated = 0
        self._fitting = False
        self._due = math.inf  # clock time of the next drawing
        self._began = (0.0, 0.0)  # clock time and fraction of the duration at the start of the fit
        self._mark = (0, 0.0)  # batches and seconds since which speed is measured
        self._speed = 0.0
        self._values: dict[str, float] = {}
        self._labels: set[str] = set()

    # --- a fit

    def fit_start(self, state: State) -> None:
        """Open the bar."""
        self._fitting = True
        self._began = (time.perf_counter(), state.progress.displayed())
        self._mark, self._speed = (state.timestamp.batch, state.timestamp.seconds), 0.0
        self._open()
        if self._bar is not None:
            self._training = self._bar.add_task("training", total=1.0, status="")

    def batch_end(self, state: State) -> None:
        """Draw if the next drawing is due."""
        if time.perf_counter() >= self._due:
            self._draw(state)

    def fit_end(self, state: State) -> None:
        """Keep the bar open until `flush`, since the last values are logged after this event."""
        self._fitting = False

    def flush(self, state: State) -> None:
        """After a fit, draw the final values and close the bar."""
        if self._console is not None and not self._fitting:
            self._draw(state)
            self.close(state)

    # --- an evaluation

    def eval_start(self, state: State) -> None:
        """Show the label of the set, in a second bar."""
        if self._console is None:
            self._open()
        self._evaluated = 0
        if self._bar is not None:
            total = _length(state) if self._fitting else None
            self._evaluation = self._bar.add_task(f"evaluating {state.eval_label}", total=total, status="")
            self._refresh()

    def eval_batch_end(self, state: State) -> None:
        """Draw if the next drawing is due."""
        self._evaluated += 1
        if time.perf_counter() >= self._due:
            self._draw_evaluation(state)

    def eval_end(self, state: State) -> None:
        """Remove the second bar."""
        self._labels.add(str(state.eval_label))
        if self._bar is not None and self._evaluation is not None:
            self._bar.remove_task(self._evaluation)
            self._evaluation = None

    def eval_standalone_end(self, state: State) -> None:
        """Close the bar."""
        if not self._fitting:
            self.close(state)

    # --- output

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Print evaluation results; other values are shown in the next drawing."""
        for label, values in by_set(metrics, self._labels).items():
            if label is None:
                self._values.update(values)
            else:
                self._print(line(state.timestamp, values))

    def exception(self, state: State) -> None:
        """Close the bar, so that the error message is readable."""
        self.close(state)

    def close(self, state: State) -> None:
        """Release the terminal."""
        bar, self._bar, self._console, self._shown = self._bar, None, None, None
        self._training = self._evaluation = None
        self._fitting, self._due = False, math.inf
        if bar is not None:
            bar.stop()

    def log_summary(self, state: State, lines: Sequence[str]) -> None:
        """Print the lines."""
        for text in lines:
            self._print(f"hocket: {text}")

    def _open(self) -> None:
        self._console = Console(file=output(self._file))
        self._due = time.perf_counter()
        notebook = None if self._file else display.notebook()
        if notebook is None and not self._console.is_interactive:
            self._due += self._seconds
            return
        status = TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        columns = (TextColumn("{task.description}", markup=False), BarColumn(20), TaskProgressColumn(), status)
        # No refresh thread: a bar that is only drawn from batch_end cannot outlive a crash.
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, expand=True)
        if notebook is None:
            self._bar.start()
        else:  # without `start`, for which rich needs ipywidgets; its text as HTML is kept when the notebook is saved
            from IPython.display import display as show

            self._shown = show(self._bar, display_id=True)

    def _refresh(self) -> None:
        if self._shown is not None:
            self._shown.update(self._bar)
        elif self._bar is not None:
            self._bar.refresh()

    def _draw(self, state: State) -> None:
        done, now = state.progress.displayed(), time.perf_counter()
        self._due = now + (self._seconds if self._bar is None else 0.1)
        batch, seconds = state.timestamp.batch - self._mark[0], state.timestamp.seconds - self._mark[1]
        if seconds >= 1 or (not self._speed and seconds > 0):
            self._speed = batch / seconds
            self._mark = (state.timestamp.batch, state.timestamp.seconds)
        # The loss first, because a narrow terminal cuts the end off.
        values = sorted(self._values.items(), key=lambda item: not item[0].startswith("train/"))[:4]
        first, *others = [f"{name} {value:.4g}" for name, value in values] or [""]
        left = ""
        if done > self._began[1] and done < 1:
            seconds = (now - self._began[0]) / (done - self._began[1]) * (1 - done)
            left = f"{datetime.timedelta(seconds=round(seconds))} left"
        speed = f"{self._speed:.3g} ba/s" if self._speed < 100 else f"{self._speed:.0f} ba/s"
        status = "  ".join(filter(None, [first, speed, left, line(state.timestamp, {}), *others]))
        if self._bar is None:
            self._print(f"{done:.0%}  {status}")
        elif self._training is not None:
            self._bar.update(self._training, completed=done, status=status)
            self._refresh()

    def _draw_evaluation(self, state: State) -> None:
        self._due = time.perf_counter() + (self._seconds if self._bar is None else 0.1)
        if self._bar is None:
            self._print(f"evaluating {state.eval_label}: {self._evaluated} batches")
        elif self._evaluation is not None:
            self._bar.update(self._evaluation, completed=self._evaluated)
            self._refresh()

    def _print(self, text: str) -> None:
        if self._bar is not None and self._shown is None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=output(self._file), flush=True)


def _length(state: State) -> int | None:
    """Return the number of batches of the set being evaluated, or None if unknown."""
    evaluated = state.eval_sets.get(str(state.eval_label))
    if evaluated is None:
        return None
    length = evaluated.source.length()
    return length if evaluated.limit is None else min(evaluated.limit, evaluated.limit if length is None else length)
