"""The suite for loggers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket
from hocket.errors import Unsupported
from hocket.loggers.memory import MemoryLogger
from hocket_testkit.callbacks import CallbackConformance
from hocket_testkit.compare import difference

#: Seconds that a run waits for a logger: more than a check may take.
_DEADLINE = 600.0
_UNUSUAL = (
    "with space", "Ärger/größe", "100%", "a\"quote'", "back\\slash", "{braces}", "$dollar", "new\nline", "x" * 300,
    "../outside", "/absolute", "", "π",
)  # fmt: skip


class LoggerConformance(CallbackConformance):
    """The tests that every logger must pass. Define ``make``, and ``written`` to read back the written values.

    Example:
        >>> import hocket
        >>> from hocket.loggers.memory import MemoryLogger
        >>> class TestMemoryLogger(hocket.testkit.LoggerConformance):
        ...     def make(self):
        ...         return MemoryLogger()
        ...     def written(self, logger, folder):
        ...         return {name: [value for _, value in values] for name, values in logger.metrics.items()}
    """

    kind = "loggers"
    #: An exception of a logger never ends a run, but it fails a test.
    pytestmark = pytest.mark.filterwarnings("error::hocket.plugins.delivery.LoggerWarning")

    def make(self) -> hocket.Logger:
        """Return a new logger that writes into the run's folder, or only into memory."""
        logger: hocket.Logger = super().make()  # type: ignore[assignment]
        return logger

    def trainer(self, plugin: Any = None, **changes: Any) -> hocket.Trainer:
        """Return the Trainer of `Conformance.trainer`, which waits for the logger: on a busy machine, too, all is read."""
        if plugin is not None:
            plugin.deadline = max(getattr(plugin, "deadline", 0.0), _DEADLINE)
        return super().trainer(plugin, **changes)

    def written(self, logger: Any, folder: Path) -> Mapping[str, Sequence[float]]:
        """Return the values of a run that the closed ``logger`` has written: every value by name, in order.

        The form is ``{"train/loss": [2.3, 2.1, 1.8], "eval/loss": [2.2, 1.7]}``: the names that ``log_metrics`` was given, and
        a float for each call that had the name, the earliest first, NaN and infinities included. Leave out positions,
        hyperparameters, images and texts. Where a file renames values, undo that here.

        Args:
            logger: a logger from ``make``.
            folder: the folder of the run, which need not exist. Two runs of one logger's class have different ones.
        """
        raise Unsupported(
            f"{type(self).__name__} needs a written(self, logger, folder) that reads back what the logger wrote. If that "
            "cannot be, exempt the tests that need it, saying why."
        )

    def test_is_a_logger(self) -> None:
        logger = self.make()
        assert isinstance(logger, hocket.Logger), f"{type(logger).__name__} is not a hocket.Logger. Inherit from it."
        hooks = [name for name in dir(logger) if name.startswith("log_")]
        assert hooks, (
            f"{type(logger).__name__} implements no logging hook. Implement log_metrics(self, state, metrics)."
        )

    # --- contents

    def test_writes_down_what_is_logged(self) -> None:
        """Every value of a run, in order."""
        logger, memory = self.make(), MemoryLogger()
        trainer = self.trainer(logger, loggers=[memory], log_every="2ba")
        trainer.fit()
        trainer.close()
        self._compare(logger, trainer, memory, "test_writes_down_what_is_logged")

    def test_goes_on_after_it_was_closed(self) -> None:
        """A later fit is written too, and earlier values are kept."""
        logger, memory = self.make(), MemoryLogger()
        trainer = self.trainer(logger, loggers=[memory], log_every="2ba")
        for _ in range(2):
            trainer.fit("1ep")
            trainer.close()
            trainer.close()
        self._compare(logger, trainer, memory, "test_goes_on_after_it_was_closed")

    def test_two_runs_do_not_mix(self) -> None:
        """Runs that train in turns are written separately."""
        loggers, memories = [self.make(), self.make()], [MemoryLogger(), MemoryLogger()]
        trainers = [
            self.trainer(logger, loggers=[memory], log_every="2ba", run_name=name, seed=seed)
            for logger, memory, name, seed in zip(loggers, memories, ("one", "two"), (1, 2), strict=True)
        ]
        for trainer in (*trainers, *trainers):
            trainer.fit("1ep")
        for trainer in trainers:
            trainer.close()
        for logger, trainer, memory in zip(loggers, trainers, memories, strict=True):
            self._compare(logger, trainer, memory, "test_two_runs_do_not_mix")

    def test_values_that_are_not_finite(self) -> None:
        """NaN and infinities, the values most worth seeing, are written unchanged."""
        values = [math.nan, math.inf, -math.inf, 0.0, 1e30, -1e-30]
        logger = self.make()
        trainer = self.trainer(logger)
        for value in values:
            trainer.state.bus.log_metrics(trainer.state, {"train/loss": value})
        trainer.state.bus.flush(trainer.state)
        trainer.close()
        written = list(self.written(logger, _folder(trainer))["train/loss"])
        tolerance = self.tolerance("test_values_that_are_not_finite", 1e-6)
        assert len(written) == len(values) and all(
            (math.isnan(got) and math.isnan(value)) or got == value or math.isclose(got, value, rel_tol=tolerance)
            for got, value in zip(written, values, strict=True)
        ), f"Logged: {values}; written: {written}."

    def test_nothing_to_write(self) -> None:
        """No metrics, no hyperparameters, a flush of nothing."""
        trainer = self.trainer(self.make())
        trainer.state.bus.log_metrics(trainer.state, {})
        trainer.state.bus.log_hyperparameters(trainer.state, {})
        trainer.state.bus.flush(trainer.state)
        trainer.close()

    @pytest.mark.parametrize("name", _UNUSUAL, ids=range(len(_UNUSUAL)))
    def test_unusual_names(self, name: str) -> None:
        """Names come from users and from layers; no name ends a run, or leads out of the run's folder."""
        trainer = self.trainer(self.make())
        trainer.state.bus.log_metrics(trainer.state, {name: 1.0, f"layer/{name}": 2.0})
        trainer.state.bus.flush(trainer.state)
        trainer.close()
        self._check_folder(trainer)

    def test_hyperparameters_of_all_kinds(self) -> None:
        """Values are JSON-like: nested, empty, None, long."""
        parameters = {
            "lr": 0.1, "epochs": 3, "name": "run", "nested": {"deep": {"deeper": [1, 2.5, None, "x", {}]}}, "none": None,
            "flag": True, "empty": {}, "list": [], "nan": math.nan, "long": "x" * 5000,
            "with space/and slash": 1, "ünïcode": "✓",
        }  # fmt: skip
        trainer = self.trainer(self.make())
        trainer.state.bus.log_hyperparameters(trainer.state, parameters)
        trainer.fit("1ba")
        trainer.close()

    def test_images_tables_texts_histograms_and_artifacts(self) -> None:
        """All kinds of values are written by loggers that implement their hooks."""
        trainer = self.trainer(self.make())
        state, bus = trainer.state, trainer.state.bus
        artifact = self.folder / "artifact.txt"
        artifact.write_text("content")
        images = [torch.rand(3, 8, 9), torch.randint(256, (1, 5, 5), dtype=torch.uint8), torch.rand(3, 2, 2).bfloat16()]
        bus.log_images(state, "images/input", images)
        bus.log_images(state, "images/none", [])
        bus.log_table(state, "tables/predictions", ["text", "score"], [["a | b\nc", 0.5], [None, math.nan]])
        bus.log_table(state, "tables/empty", ["column"], [])
        bus.log_text(state, "texts/sample", "# A title\n\n| a text")
        bus.log_text(state, "texts/empty", "")
        bus.log_histogram(state, "histograms/weights", [1, 0, 2.5], [-1.0, 0.0, 0.5, 2.0])
        bus.log_artifact(state, "artifacts/file", artifact)
        bus.flush(state)
        trainer.close()

    # --- location

    def test_writes_nothing_unasked(self) -> None:
        """A Trainer that was only constructed or planned leaves no file and no folder."""
        trainer = self.trainer(self.make())
        trainer.plan()
        trainer.close()
        assert not any(self.folder.iterdir()), (
            f"There is {sorted(self.folder.rglob('*'))} though nothing was logged. Open files when the first value arrives."
        )

    def test_writes_into_the_folder_of_the_run(self) -> None:
        trainer = self.trainer(self.make())
        trainer.fit()
        trainer.close()
        self._check_folder(trainer)

    def test_writes_on_rank_0_only(self) -> None:
        """Other ranks write nothing, unless the logger has ``all_ranks``."""
        logger = self.make()
        if logger.all_ranks:
            return
        trainer = self.trainer(logger)
        trainer.state.bus.on_rank(1)
        trainer.fit()
        trainer.close()
        assert not self._files(), f"There is {self._files()}, written by rank 1."

    def _check_folder(self, trainer: hocket.Trainer) -> None:
        outside = [path for path in self._files() if _folder(trainer) not in path.parents]
        assert not outside, f"{outside} is outside the run's folder. Write into state.run_folder."

    def _compare(self, logger: hocket.Logger, trainer: hocket.Trainer, memory: MemoryLogger, test: str) -> None:
        expected = {name: [value for _, value in values] for name, values in sorted(memory.metrics.items())}
        written = {name: list(values) for name, values in sorted(self.written(logger, _folder(trainer)).items())}
        found = difference(written, expected, self.tolerance(test, 1e-6), at="what was written")
        assert found is None, f"The written values differ from the logged ones: {found}."


def _folder(trainer: hocket.Trainer) -> Path:
    return Path(trainer.state.folder.path)  # state.run_folder would make it
