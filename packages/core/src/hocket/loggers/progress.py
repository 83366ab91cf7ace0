"""A progress bar, or lines where there is no terminal."""

from __future__ import annotations

import datetime
import math
import sys
import time
from collections.abc import Mapping
from typing import IO

from hocket.logger import Logger
from hocket.loggers.console import by_set, line
from hocket.state import State
from hocket.training import seeding

with seeding.preserved():  # rich draws one of Python's random numbers while it is imported
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
    from rich.table import Column


class ProgressLogger(Logger):
    """Shows a progress bar with loss, speed and the time that is left; plain lines where the output is not a terminal.

    The bar stands for the planned duration; a second one is there while a set is evaluated. It is drawn at most ten times a
    second; between drawings a batch costs one look at the clock. What an evaluation came to is always printed as a line.

    Args:
        file: where to; None for what ``sys.stderr`` is when a fit or an evaluation begins.
        seconds: time between plain lines about training.

    Example:
        >>> import hocket, sys, torch
        >>> from hocket.loggers.progress import ProgressLogger
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, loggers=[ProgressLogger(file=sys.stdout)], device="cpu")
    """

    shows_only = True

    def __init__(self, file: IO[str] | None = None, seconds: float = 10.0) -> None:
        self._file = file
        self._seconds = seconds
        self._console: Console | None = None  # as long as there is something to show
        self._bar: Progress | None = None  # if it is a terminal
        self._training: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._evaluated = 0
        self._fitting = False
        self._due = math.inf  # when to draw again, by the clock
        self._began = (0.0, 0.0)  # the clock and the share of the duration, when the fit began
        self._mark = (0, 0.0)  # batches and seconds from which speed is measured
        self._speed = 0.0
        self._values: dict[str, float] = {}
        self._labels: set[str] = set()

    # --- a fit

    def fit_start(self, state: State) -> None:
        """Opens the bar."""
        self._fitting = True
        self._began = (time.perf_counter(), state.elapsed())
        self._mark, self._speed = (state.timestamp.batch, state.timestamp.seconds), 0.0
        self._open()
        if self._bar is not None:
            self._training = self._bar.add_task("training", total=1.0, status="")

    def batch_end(self, state: State) -> None:
        """Draws, if the last drawing is old."""
        if time.perf_counter() >= self._due:
            self._draw(state)

    def fit_end(self, state: State) -> None:
        """The last values are still to come."""
        self._fitting = False

    def flush(self, state: State) -> None:
        """After a fit, draws how it ended and closes the bar."""
        if self._console is not None and not self._fitting:
            self._draw(state)
            self.close(state)

    # --- an evaluation

    def eval_start(self, state: State) -> None:
        """Says what is evaluated."""
        if self._console is None:
            self._open()
        self._evaluated = 0
        if self._bar is not None:
            total = _length(state) if self._fitting else None
            self._evaluation = self._bar.add_task(f"evaluating {state.eval_label}", total=total, status="")
            self._bar.refresh()

    def eval_batch_end(self, state: State) -> None:
        """Draws, if the last drawing is old."""
        self._evaluated += 1
        if time.perf_counter() >= self._due:
            self._draw_evaluation(state)

    def eval_end(self, state: State) -> None:
        """Takes the second bar away."""
        self._labels.add(str(state.eval_label))
        if self._bar is not None and self._evaluation is not None:
            self._bar.remove_task(self._evaluation)
            self._evaluation = None

    def eval_standalone_end(self, state: State) -> None:
        """Closes the bar."""
        if not self._fitting:
            self.close(state)

    # --- what is shown

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Prints what evaluations came to; the rest is shown when it is drawn next."""
        for label, values in by_set(metrics, self._labels).items():
            if label is None:
                self._values.update(values)
            else:
                self._print(line(state.timestamp, values))

    def exception(self, state: State) -> None:
        """Closes the bar, so that the message is readable."""
        self.close(state)

    def close(self, state: State) -> None:
        """Gives the terminal back."""
        bar, self._bar, self._console = self._bar, None, None
        self._training = self._evaluation = None
        self._fitting, self._due = False, math.inf
        if bar is not None:
            bar.stop()

    def _open(self) -> None:
        self._console = Console(file=self._file or sys.stderr)
        self._due = time.perf_counter()
        if not self._console.is_interactive:
            self._due += self._seconds
            return
        status = TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        columns = (TextColumn("{task.description}", markup=False), BarColumn(20), TaskProgressColumn(), status)
        # No thread of its own: a bar that is drawn from batch_end cannot be left behind by a crash.
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, expand=True)
        self._bar.start()

    def _draw(self, state: State) -> None:
        share, now = state.elapsed(), time.perf_counter()
        self._due = now + (self._seconds if self._bar is None else 0.1)
        batch, seconds = state.timestamp.batch - self._mark[0], state.timestamp.seconds - self._mark[1]
        if seconds >= 1 or (not self._speed and seconds > 0):
            self._speed = batch / seconds
            self._mark = (state.timestamp.batch, state.timestamp.seconds)
        status = f"{self._speed:.3g} ba/s"
        if share > self._began[1] and share < 1:
            left = (now - self._began[0]) / (share - self._began[1]) * (1 - share)
            status += f"  {datetime.timedelta(seconds=round(left))} left"
        training_first = sorted(self._values.items(), key=lambda item: not item[0].startswith("train/"))
        status += "  " + line(state.timestamp, dict(training_first[:4]))
        if self._bar is None:
            self._print(f"{share:.0%}  {status}")
        elif self._training is not None:
            self._bar.update(self._training, completed=share, status=status)
            self._bar.refresh()

    def _draw_evaluation(self, state: State) -> None:
        self._due = time.perf_counter() + (self._seconds if self._bar is None else 0.1)
        if self._bar is None:
            self._print(f"evaluating {state.eval_label}: {self._evaluated} batches")
        elif self._evaluation is not None:
            self._bar.update(self._evaluation, completed=self._evaluated)
            self._bar.refresh()

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._file or sys.stderr, flush=True)


def _length(state: State) -> int | None:
    """Return how many batches the set being evaluated has, or None where that is not known."""
    evaluated = state.eval_sets.get(str(state.eval_label))
    if evaluated is None:
        return None
    length = evaluated.source.length()
    return length if evaluated.limit is None else min(evaluated.limit, evaluated.limit if length is None else length)
