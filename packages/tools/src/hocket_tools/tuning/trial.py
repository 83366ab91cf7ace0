"""Take steps of a Trainer's own loop on trial: nothing is logged or written, and afterwards everything is as before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hocket.basics.control_c import Interruption, deferred
from hocket.basics.time import Time, Unit
from hocket.data.adapters import adapt, prepared
from hocket.data.loaders import independent
from hocket.data.source import limited
from hocket.data.training_iterator import TrainingIterator, iterates_once
from hocket.errors import WrongState, WrongValue
from hocket.help.ours import is_ours
from hocket.hookspecs import HOOKS, Event
from hocket_checkpoints.content import of_run
from hocket_tools.beside import beside, explained
from hocket_tools.tuning.snapshot import Snapshot

if TYPE_CHECKING:
    from hocket.hookspecs.attachment import Attachment
    from hocket.run.trainer import Trainer
    from hocket.state.state import State

_ACTIONS = HOOKS - {event.value for event in Event}
#: Returns the functions to call instead of some hooks, by name, from the state whose bus has the hooks of training.
Hooks = Callable[["State"], Mapping[str, Callable[..., Any]]]
#: Called with what is done, such as "range test, step", with the number of it and the number of all.
Progress = Callable[[str, int, int], None]


class EndOfTrial(BaseException):
    """Ends a trial early. Like KeyboardInterrupt it is no Exception, which a task might catch."""


def check(trainer: Trainer) -> None:
    """Raise ValueError without an optimizer, and RuntimeError during a fit or after loading a checkpoint has failed."""
    state = trainer.state
    if trainer._loop.stage is not None:
        raise WrongState("A search cannot run during a fit. Call tune(trainer, …) before fit, or between two fits.")
    of_run(state).check_loaded()
    if not state.optimizers:
        raise WrongValue("There is no optimizer to search with. Write «optimizer='adamw(lr=1e-3)'».")


@explained("A step on trial")
def take_steps(trainer: Trainer, batches: int, hooks: Hooks) -> str:
    """Train on some batches, with other functions for some hooks. Every rank has to call it.

    Returns why a hook raised `EndOfTrial`, or "". A non-finite loss ends it, too.

    The Trainer reads its training data from the beginning of an epoch, its schedules do nothing, and no logger, no
    checkpoint and no callback that only observes is called. Afterwards, after an exception too, everything in memory is
    bitwise as before, and nothing was written.

    Raises ValueError without training data that can be iterated again.
    """
    state, settings = trainer.state, trainer.settings
    quiet = [each for each in state.bus.attachments if not _needed(each)]
    data = [state.train_data, state.train_loader, settings.train_data, settings.eval_data, settings.data]
    data += [each.data for each in state.eval_sets.values()]
    snapshot = Snapshot([trainer], [each for each in data if each is not None], [each.obj for each in quiet])
    try:
        with deferred(state.strategy.world_size == 1) as interruption:
            return _take(trainer, batches, hooks, quiet, interruption)
    finally:
        with deferred(True):
            snapshot.restore()


def _take(trainer: Trainer, batches: int, hooks: Hooks, quiet: list[Attachment], interruption: Interruption) -> str:
    state, loop, error, why = trainer.state, trainer._loop, None, ""
    bus, progress = state.bus, state.progress
    bus.replace({hook: bus.compiled(hook, quiet) for hook in HOOKS})
    trainer._data.make("train", running=trainer._running)
    state.data.eval_sets, state.optimization.schedules = {}, []
    for each in bus.attachments:
        if each.name == "auto-microbatch":
            each.obj._cache = None  # so that it writes no file
    loop.interrupted_at, loop._due = None, None
    loop._guard = guard = _Guard()  # type: ignore[assignment]  # it warns, and counts skipped batches
    if loop.steps is not None:
        loop.steps._guard = guard  # type: ignore[assignment]
    progress.fit_until = Time(state.timestamp.batch + batches, Unit.BATCH)
    progress.max_duration = progress.max_duration or trainer.settings.duration or progress.fit_until
    with trainer._running():
        try:
            with _data(trainer):
                bus.replace(hooks(state))
                loop.run(interruption)
        except EndOfTrial as end:
            why = str(end)
        except BaseException as raised:  # raised again outside, because an exception inside closes the Trainer
            error = raised
    if error is not None:
        raise error
    return why


def loss_of(state: State) -> float:
    """Return the loss of the current step, the same on all ranks; infinity for a non-finite one."""
    loss = torch.tensor(math.inf) if state.loss is None else state.loss.detach().float()
    loss = torch.where(loss.isfinite(), loss, math.inf)
    return float(loss if state.strategy.world_size == 1 else state.bus.all_reduce(loss, "max"))


def _needed(attachment: Attachment) -> bool:
    """Whether training would compute something else without a plug-in: callbacks that only observe, and loggers, are not."""
    if attachment.kind != "callbacks":
        return attachment.kind != "loggers"
    package = type(attachment.obj).__module__.partition(".")[0]
    observes = is_ours(package) and package in ("hocket_checkpoints", "hocket_insight")
    return not observes and any(callable(getattr(attachment.obj, name, None)) for name in _ACTIONS)


@contextmanager
def _data(trainer: Trainer) -> Iterator[None]:
    """Have the loop read its training data anew; the iterator in use stays where it is."""
    state, settings, data = trainer.state, trainer.settings, trainer.state.train_data
    if data is None:
        raise WrongValue("There is no training data to search with. Pass «train_data=» to the Trainer.")
    if iterates_once(data):
        raise WrongValue(
            f"The training data ({type(data).__name__}) is an iterator, which would lose the batches that the search reads. "
            "Pass what it iterates over, such as the list or the DataLoader itself."
        )

    def prepare(loader: Any, *how: Any) -> Any:
        return state.bus.prepare_data(independent(loader), *how)

    with beside(adapt(prepared(data, prepare, True, settings.global_batch), given=data)) as source:
        limit = limited(source, settings.limit_train, "limit_train")
        iterator = TrainingIterator(source, limit, settings.overfit, settings.accumulate or 1)
        trainer._loop.data, state.progress.epoch_length = iterator, iterator.length
        state.data.sample_indices, state.data.is_last_batch = iterator.indices, iterator.is_last
        yield


class _Guard:
    """In place of the guard against non-finite values, which warns and counts: they end the trial."""

    #: Steps in a row that loss scaling skips while it looks for its scale, at most.
    most_skipped = 20

    def __init__(self) -> None:
        self._skipped = 0

    def allows(self, state: State) -> bool:
        overflowed = state.bus.overflowed(state.bus.all_reduce)
        self._skipped = self._skipped + 1 if overflowed else 0
        if not math.isfinite(loss_of(state)) or self._skipped > self.most_skipped:
            raise EndOfTrial("the loss or the gradients became NaN or infinite")
        return not overflowed

    def interval_end(self, state: State) -> None: ...

    def fit_end(self, state: State) -> None: ...
