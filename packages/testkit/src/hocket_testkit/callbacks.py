"""The suite for callbacks."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

import hocket
from hocket.loggers.memory import MemoryLogger
from hocket_testkit.compare import difference
from hocket_testkit.conformance import weights
from hocket_testkit.runs import RunConformance


class CallbackConformance(RunConformance):
    """The tests that every callback must pass. Define ``make``; configure it so that it does not stop these runs.

    Example:
        >>> import hocket
        >>> from hocket_insight.callbacks.lr_monitor import LRMonitor
        >>> class TestLRMonitor(hocket.testkit.CallbackConformance):
        ...     def make(self):
        ...         return LRMonitor()
    """

    kind = "callbacks"

    def make(self) -> hocket.Callback:
        """Return a new callback."""
        callback: hocket.Callback = super().make()
        return callback

    def test_is_no_algorithm(self) -> None:
        """Callbacks observe; a plug-in that changes the run is a hocket.Algorithm."""
        callback = self.make()
        assert isinstance(callback, hocket.Callback), (
            f"{type(callback).__name__} is not a hocket.Callback. Inherit from it."
        )
        assert not isinstance(callback, hocket.Algorithm), f"{type(callback).__name__} is an algorithm; use that suite."

    def test_does_not_change_training(self) -> None:
        """Weights, metrics, orders of evaluations and length of the run are bitwise those of a run without it."""
        one, other = (torch.Generator().manual_seed(5) for _ in range(2))
        with_it, without = self._evaluating(self.make(), one), self._evaluating(None, other)
        result, expected = with_it.fit(), without.fit()
        found = (
            difference(one.get_state(), other.get_state(), at="the generator of the evaluation set")
            or difference(weights(with_it), weights(without), at="weights")
            or difference(result.metrics, expected.metrics, at="metrics")
            or difference(result.timestamp.batch, expected.timestamp.batch, at="the number of batches")
        )
        assert found is None, (
            f"A run with the callback differs from the run without it: {found}. A callback only reads; to change the run, make "
            "it a hocket.Algorithm. Declare one that makes requests of the loop in `exempt`."
        )

    def _evaluating(self, plugin: hocket.Callback | None, order: torch.Generator) -> hocket.Trainer:
        """Return a Trainer that evaluates on shuffled data, unless the author gives others."""
        shuffled: object = DataLoader(list(self.seeded(self.data)), None, True, generator=order)  # type: ignore[arg-type]
        return self.trainer(plugin, **{"eval_data": shuffled, **self.arguments()})

    def test_closes_without_having_been_used(self) -> None:
        """Closing works if the run ended before training started."""
        trainer = self.trainer(self.make())
        trainer.close()
        trainer.close()

    def test_logs_the_same_in_turns(self) -> None:
        """In each of two runs that train in turns, it logs the same names as in a single run."""
        plugins = [self.make() for _ in range(3)]
        logs = [MemoryLogger() for _ in plugins]
        alone, *turns = [
            self.trainer(plugin, loggers=[log], log_every="1ba", run_name=f"run-{number}")
            for number, (plugin, log) in enumerate(zip(plugins, logs, strict=True))
        ]
        for trainer in (alone, alone, *turns, *turns):
            trainer.fit("1ep")
        expected = {name: [batch for batch, _ in values] for name, values in logs[0].metrics.items()}
        for log in logs[1:]:
            got = {name: [batch for batch, _ in values] for name, values in log.metrics.items()}
            found = difference(got, expected, at="the batches at which values were logged")
            assert found is None, (
                f"It logs differently when two Trainers train in turns: {found}. Keep everything in self or in the state."
            )
