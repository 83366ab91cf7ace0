"""A logger that prints lines on the console."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from hocket.basics.display import notebook
from hocket.basics.timestamp import Timestamp
from hocket.hookspecs.logger import Logger
from hocket.state.state import State


class ConsoleLogger(Logger):
    """Print a line whenever values are logged, and one for each evaluation set: the position, then names and values.

    After a fit, the last lines say what was written and how to continue.

    Args:
        file: the file to print to; None for the current ``sys.stderr`` or, in a notebook, which colours that as an error,
            ``sys.stdout``.

    Example:
        >>> import hocket, sys, torch
        >>> from hocket.loggers.console import ConsoleLogger
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20, duration="1ep", loggers=[ConsoleLogger(sys.stdout)],
        ... )
        >>> result = trainer.fit()
        ep 0 ba 10  train/loss ...
        ep 0 ba 20  train/loss ...
        hocket: done at ep 1 ba 20: ...
    """

    synchronous = True  # keeps the order relative to other output
    shows_only = True

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file
        self._labels: set[str] = set()

    def eval_end(self, state: State) -> None:
        """Record the label of the set."""
        self._labels.add(str(state.eval_label))

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Print the values, one line for training and one for each evaluation set."""
        for values in by_set(metrics, self._labels).values():
            print(line(state.timestamp, values), file=output(self._file), flush=True)

    def log_summary(self, state: State, lines: Sequence[str]) -> None:
        """Print the lines."""
        for text in lines:
            print(f"hocket: {text}", file=output(self._file), flush=True)


def output(file: IO[str] | None) -> IO[str]:
    """Return the file, or the one to print to if it is None."""
    return file or (sys.stderr if notebook() is None else sys.stdout)


def line(now: Timestamp, metrics: Mapping[str, float]) -> str:
    """Format position and values, such as ``ep 2 ba 45  train/loss 0.0123  test/accuracy 0.981``."""
    return "  ".join([f"ep {now.epoch} ba {now.batch}", *(f"{name} {value:.4g}" for name, value in metrics.items())])


def by_set(metrics: Mapping[str, float], labels: Collection[str]) -> dict[str | None, dict[str, float]]:
    """Group values by the label of their evaluation set; values of no set come first, under None."""
    if not labels:
        return {None: dict(metrics)} if metrics else {}
    divided: dict[str | None, dict[str, float]] = {None: {}}
    for name, value in metrics.items():
        own = max((label for label in labels if name.startswith(f"{label}/")), key=len, default=None)
        divided.setdefault(own, {})[name] = value
    return {label: values for label, values in divided.items() if values}
