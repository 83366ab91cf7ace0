"""The data of a run: what the loop trains on and evaluations read, as given or made by a data module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from hocket.data.adapters import adapt, prepared
from hocket.data.checks import check_batches
from hocket.data.loaders import independent
from hocket.data.source import Source, limited
from hocket.data.training_iterator import TrainingIterator
from hocket.help import optional_packages
from hocket.loop.evaluate import EvalData, prepare_sets
from hocket.loop.fit import FitLoop
from hocket.loop.settings import Settings
from hocket.run import same_on_ranks
from hocket.state.state import State

if TYPE_CHECKING:
    from hocket_data.data_module_loading import ModuleData


class RunData:
    """Set the data of a run, which its arguments, a fit's arguments or a data module provide.

    Attributes:
        module: the data module of the run; None without one.
    """

    def __init__(self, state: State, loop: FitLoop, settings: Settings) -> None:
        self._state, self._loop, self._settings = state, loop, settings
        self.module: ModuleData | None = None
        if settings.data is not None:
            self.module = optional_packages.module("hocket_data.data_module_loading").ModuleData(
                settings.data, state, settings.seed
            )

    def make(self, *names: str, running: Callable[[], AbstractContextManager[None]]) -> None:
        """Set the data that the data module makes, unless it is set already. All ranks call it together.

        Args:
            names: "train", "eval".
            running: the context of the Trainer's random numbers and settings.
        """
        module, state = self.module, self._state
        if module is None:
            return
        if "train" in names and not self._loop.has_data:
            data = module.make("train")
            if data is not None:
                with running():
                    self.train_on(data, module.described("train"))
        if "eval" in names and not state.eval_sets and "eval" not in module.made:
            data = module.make("eval")
            with running():
                self.evaluate_on(data, module.described("eval"))
                state.content.eval_sets_are_made()
            sets = {"eval_data": same_on_ranks.of_sets(state.eval_sets)}
            same_on_ranks.over_ranks(state.bus, state.strategy.world_size, sets)

    def train_on(self, data: Iterable[Any], argument: str = "train_data") -> None:
        """Train on this data from now on. Raises TypeError, which names the argument, for anything but batches."""
        check_batches(data, argument)
        state, settings = self._state, self._settings
        state.data.train_data = data
        state.data.train_loader = prepared(data, state.bus.prepare_data, True, settings.global_batch)
        source = adapt(state.train_loader, given=data)
        limit = limited(source, settings.limit_train, "limit_train")
        self._loop.data = iterator = TrainingIterator(source, limit, settings.overfit, settings.accumulate or 1)
        state.progress.epoch_length = iterator.length
        state.data.sample_indices, state.data.is_last_batch = iterator.indices, iterator.is_last

        def again() -> Source:
            size, prepare = settings.global_batch, state.bus.prepare_data
            return adapt(
                prepared(data, lambda loader, *how: prepare(independent(loader), *how), True, size), given=data
            )

        state.data.another_epoch = partial(iterator.another_epoch, again)
        state.content.train_data_is_set()

    def evaluate_on(
        self,
        data: EvalData | None,
        argument: str = "eval_data",
    ) -> None:
        """Evaluate this data from now on; None for nothing. Raises TypeError, which names the argument, for anything else."""
        state, settings = self._state, self._settings
        state.data.eval_sets = {} if data is None else prepare_sets(state, data, settings.metrics, settings, argument)
