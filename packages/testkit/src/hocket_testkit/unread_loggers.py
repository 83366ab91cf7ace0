"""The suite for loggers without a ``written``: it looks for the logged numbers in the files of the run, and in the logger."""

from __future__ import annotations

import contextlib
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket.loggers.memory import MemoryLogger
from hocket_testkit.loggers import LoggerConformance

_NAME = "check/value"
_TEXT = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w.])")
#: Formats of a float in files that are no text.
_FORMATS = ("<f", "<d", ">f", ">d")
_UNREADABLE = (
    "no file of the run and no attribute of the logger has the logged numbers, so whether all are written, and in order, was "
    "not read: name a suite with written() in the entry-point group hocket.conformance"
)


class UnreadLogger(LoggerConformance):
    """`LoggerConformance`, whose tests of contents look for numbers that occur nowhere else: they see no names."""

    def test_writes_down_what_is_logged(self) -> None:
        """Every value of a run is in its files, in order where they are texts."""
        self._run(["2ep"])

    def test_goes_on_after_it_was_closed(self) -> None:
        """A later fit is written too, and earlier values are kept."""
        self._run(["1ep", "1ep"])

    def test_two_runs_do_not_mix(self) -> None:
        """Runs that train in turns are written separately."""
        runs = [self._start(31415.9, "one"), self._start(92653.5, "two")]
        for trainer, *_ in (*runs, *runs):
            trainer.fit("1ep")
        for trainer, *_ in runs:
            trainer.close()
        for (trainer, logger, expected), (_, _, others) in zip(runs, reversed(runs), strict=True):
            numbers = _Numbers(logger, Path(trainer.state.folder.path))
            self._compare_numbers(numbers, _logged(expected))
            mixed = [value for value in _logged(others) if numbers.has(value)]
            assert not mixed, (
                f"What a run logged is also in the {numbers.where} of another: {mixed[:3]}. Keep everything in self, and write "
                "into state.run_folder."
            )

    def test_values_that_are_not_finite(self) -> None:
        """Values after NaN and infinities are written; how those look in a file is not read."""
        logger = self.make()
        trainer = self.trainer(logger)
        values = [31415.9, math.nan, 32044.2, math.inf, 32672.5, -math.inf, 33300.9]
        for value in values:
            trainer.state.bus.log_metrics(trainer.state, {_NAME: value})
        trainer.state.bus.flush(trainer.state)
        trainer.close()
        numbers = _Numbers(logger, Path(trainer.state.folder.path))
        self._compare_numbers(numbers, [each for each in values if math.isfinite(each)])

    def _run(self, durations: list[str]) -> None:
        trainer, logger, expected = self._start(31415.9, "run")
        for duration in durations:
            trainer.fit(duration)
            trainer.close()
        self._compare_numbers(_Numbers(logger, Path(trainer.state.folder.path)), _logged(expected))

    def _start(self, first: float, name: str) -> tuple[hocket.Trainer, hocket.Logger, MemoryLogger]:
        logger, memory = self.make(), MemoryLogger()
        callbacks = [*self.arguments().get("callbacks", ()), _LogsNumbers(first)]
        changes: dict[str, Any] = {"eval_data": None, "log_every": "1ba"}  # each row has the number, the last one, too
        trainer = self.trainer(logger, loggers=[memory], callbacks=callbacks, run_name=name, **changes)
        return trainer, logger, memory

    def _compare_numbers(self, numbers: _Numbers, expected: list[float]) -> None:
        has = [value for value in expected if numbers.has(value)]
        if not has or (not numbers.files and 2 * len(has) < len(expected)):  # it may show the latest ones only
            pytest.skip(_UNREADABLE)
        lost = [value for value in expected if value not in has]
        assert not lost, (
            f"Of {len(expected)} values that were logged the {numbers.where} has {len(has)}: {lost[:3]} is missing. Append "
            "each value that log_metrics is given, and write out in flush(state) and close(state) what waits."
        )
        assert numbers.ordered(expected), (
            f"The {numbers.where} has the logged values in another order. Append each value as log_metrics is given it."
        )


class _LogsNumbers(hocket.Callback):
    """Log a number in each batch that is far from all others."""

    def __init__(self, first: float) -> None:
        self._first = first

    def batch_end(self, state: hocket.State) -> None:
        state.log({_NAME: self._first * (1 + state.timestamp.batch / 50)})


class _Numbers:
    """The numbers in the files of a run, or where there are none in a logger."""

    def __init__(self, logger: hocket.Logger, folder: Path) -> None:
        self.files = False
        self._texts: list[list[float]] = []
        self._bytes: list[bytes] = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            try:
                self._texts.append([float(each) for each in _TEXT.findall(content.decode())])
            except UnicodeDecodeError:
                self._bytes.append(content)
        self._texts.append([number for text in self._texts for number in text])  # a file for each fit
        self.where = "folder of the run"
        if any(self.has(value) for value in _MARKS):
            self.files = True
        else:
            self._texts, self._bytes, self.where = [_floats(vars(logger))], [], "logger"

    def has(self, value: float) -> bool:
        """Return whether the value is somewhere."""
        patterns = [struct.pack(each, value) for each in _FORMATS]
        return any(_alike(value, each) for text in self._texts for each in text) or any(
            pattern in content for content in self._bytes for pattern in patterns
        )

    def ordered(self, values: list[float]) -> bool:
        """Return whether a text has the values in this order; those in other files and databases have none that can be read."""
        rows = [[each for each in text if any(_alike(value, each) for value in values)] for text in self._texts]
        return not any(len(row) >= len(values) for row in rows) or any(_in_order(values, row) for row in rows)


#: All numbers that are logged.
_MARKS = [first * (1 + batch / 50) for first in (31415.9, 92653.5) for batch in range(17)]


def _in_order(values: list[float], numbers: list[float]) -> bool:
    remaining = iter(numbers)
    return all(any(_alike(value, each) for each in remaining) for value in values)


def _alike(value: float, number: float) -> bool:
    return math.isclose(value, number, rel_tol=2e-3)  # a text may round


def _floats(nested: Any, depth: int = 0) -> list[float]:
    """Return the numbers in nested containers, and in objects of the logger's own."""
    if isinstance(nested, int | float):
        return [float(nested)]
    if depth > 6 or isinstance(nested, str | bytes):
        return []
    with contextlib.suppress(TypeError):
        items = nested.values() if isinstance(nested, Mapping) else nested if hasattr(nested, "__len__") else ()
        return [number for each in items for number in _floats(each, depth + 1)]
    return []


def _logged(memory: MemoryLogger) -> list[float]:
    values = [value for _, value in memory.metrics[_NAME]]
    assert len(values) > 3, "The run of the check logged nothing: give data() more batches."
    return values
