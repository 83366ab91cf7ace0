"""When checkpoints are written, how many are kept, and what happens when the process is told to end."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from hocket.callback import Callback
from hocket.checkpoints import resuming
from hocket.checkpoints.background import Background
from hocket.checkpoints.components.model import by_own_names
from hocket.checkpoints.components.plugins import described
from hocket.checkpoints.hidden import HiddenTensors
from hocket.checkpoints.ownership import Ownership
from hocket.checkpoints.retention import Retention
from hocket.checkpoints.signals import EXIT_CODE, Interrupted, Signals
from hocket.checkpoints.storage.errors import CheckpointError
from hocket.checkpoints.storage.ranks import Ranks, of_a_thread
from hocket.checkpoints.storage.snapshot import Snapshot
from hocket.checkpoints.storage.store import Store
from hocket.distributed.agreement import ranks_of
from hocket.hookspecs import hookimpl
from hocket.state import State
from hocket.time import Interval, Unit
from hocket.training import seeding
from hocket.training.requests import Decision


class Checkpoints(Callback):
    """Writes all that a run needs to continue as if it had never stopped: ``Trainer(checkpoints=Checkpoints("runs/a"))``.

    Every rank writes the shards that it holds, rank 0 the rest. A checkpoint is complete or not there, whenever a process
    dies. The end of a fit writes one too. During a fit SIGTERM and SIGINT (Control-C) write one at the end of the batch, epoch
    or fit under way, and end the run with `Interrupted`; another signal, a second or more after the first, ends it at once.
    ``Trainer(resume="auto")`` continues from the newest valid one.

    Args:
        folder: where to; any folder, or a URL that fsspec knows, such as ``"s3://bucket/runs/a"``. One that all ranks share
            where they hold shards.
        every: how often: ``"500ba"``, ``"1ep"``, ``"0.1dur"``, ``"30min"``; None for only at the end and when asked.
        keep: how many of the latest to keep; None for all. Copies under other names, and links, stay.
        best: ``(metric, "max" | "min", how many)``: write one after an evaluation in which the metric, such as
            ``"test/accuracy"``, is among the best so many, and keep those.
        asynchronous: write in a thread. What optimizers change is copied while the gradients of the next batch are computed,
            the rest at once, into memory that is kept for the next; training waits for the last write if that takes longer
            than the interval.
        weights_only: model weights and what was attached; to publish, not to resume.
        on_error: what a write that failed does to the run: ``"stop"`` it, or ``"warn"`` and go on.
        overwrite: replace the checkpoints of an older run that a new one finds there, or later ones of the same run that is
            resumed from an older one. One line says which; they are removed once there is a new one. Without it, such a run
            is refused.

    Raises:
        ValueError: an argument is out of its range, or at the first evaluation: there is no such metric.

    Example:
        >>> import hocket, torch
        >>> data = [(torch.randn(8, 4), torch.randn(8, 1))] * 10
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", train_data=data, duration="2ep",
        ...     checkpoints=hocket.Checkpoints("runs/a", every="1ep", keep=2), resume="auto", device="cpu",
        ... )
        >>> trainer.fit().checkpoints
        ['ep1-ba10', 'ep2-ba20']
    """

    #: One instance may be given to several Trainers, one after another.
    begins_anew = True

    def __init__(
        self,
        folder: str | Path,
        every: str | Interval | None = "1ep",
        keep: int | None = 3,
        best: tuple[str, Literal["max", "min"], int] | None = None,
        asynchronous: bool = False,
        weights_only: bool = False,
        on_error: Literal["stop", "warn"] = "stop",
        overwrite: bool = False,
    ) -> None:
        self._retention = Retention(keep, best)
        if on_error not in ("stop", "warn"):
            raise ValueError(f"on_error={on_error!r} is neither 'stop' nor 'warn'.")
        self.store = Store(folder)
        self._owned = Ownership(self.store, overwrite)
        #: On rank 0, during a fit.
        self._writes_alone = False
        self._every = Interval(every)
        self._asynchronous, self._weights_only, self._on_error = asynchronous, weights_only, on_error
        self._state: Callable[[], State | None] = lambda: None
        self._in_shares = self._every.every is not None and self._every.every.unit is Unit.DURATION
        self._share = 0.0
        #: Epoch and batch of the latest evaluation, by the set's label.
        self._evaluated: dict[str, tuple[int, int]] = {}
        #: The batch of what was saved last, and the evaluations before it.
        self._saved: tuple[int, dict[str, tuple[int, int]]] | None = None
        self._background, self._hidden = Background(), HiddenTensors()
        self._threads: Ranks | None = None
        self._failure: BaseException | None = None
        self._signals = Signals()
        if asynchronous:  # a wrapper takes a microsecond of every step
            self.optimizer_step = self._after_the_copy

    @hookimpl(tryfirst=True)
    def init(self, state: State) -> None:
        """Write this run's state from here on, and forget another's.

        Raises CheckpointError, on all ranks, if the run is a new one and there are checkpoints of others.
        """
        if state.resumes is None:
            self.begin_run(state)
        self._state = weakref.ref(state)
        self._saved, self._evaluated, self._share = None, {}, 0.0
        self._failure = self._threads = None
        self._background.join()
        self._background, self._hidden = Background(), HiddenTensors()

    def resume(self, state: State, where: str | Path) -> bool:
        """Continue the run of a checkpoint of this store; begin one of its own from a checkpoint elsewhere."""
        resuming.resume(state, where, self)
        return True

    def begin_run(self, state: State, readable: bool = True) -> None:
        """For `resuming`: this is a new run. See `Ownership.begin`."""
        with seeding.preserved(devices=False):
            ranks_of(state).first(lambda: self._owned.begin(state.run, readable))
        state.folder.take_over(self.store.where)

    def continue_run(self, state: State, name: str, newest: bool) -> None:
        """For `resuming`: the run continues from this checkpoint of the store; see `Ownership.resume`.

        Raises CheckpointError if the store is a copy, and the run went on from the other: its folder can follow only one.
        """
        elsewhere = state.folder.moved_from(self.store.where)
        ranks_of(state).first(lambda: self._owned.resume(state.run, name, newest, elsewhere))

    def before_fit(self, state: State) -> None:
        """Raise CheckpointError, on all ranks, if another run writes here or has written."""
        with seeding.preserved(devices=False):
            ranks_of(state).first(lambda: self._take(state))

    def _take(self, state: State) -> None:
        problem = self.store.acquire(state.run.name)
        try:
            if problem is not None and self._on_error == "stop":
                raise CheckpointError(
                    f"No checkpoint can be written to {self.store.where}: {problem}. Make it a folder that this user may write "
                    "to, or give another: checkpoints=hocket.Checkpoints('…')."
                )
            self._owned.check()
        except BaseException:
            self.store.release()
            raise
        self._writes_alone = True

    # --- when

    def fit_start(self, state: State) -> None:
        """Listens to signals from here on, in the main thread. Raises ValueError if a Trainer that came later has these."""
        if self._state() is not state:
            raise ValueError(
                f"These Checkpoints in {self.store} were given to another Trainer after this one. Give each Trainer its own: "
                f"checkpoints=hocket.Checkpoints({str(self.store.folder)!r})."
            )
        if self._in_shares:
            self._share = state.elapsed()
        self._signals.listen()

    @hookimpl(wrapper=True)
    def _after_the_copy(self) -> Generator[None, bool, bool]:
        """Wait, before the optimizer's step, until the weights are copied."""
        self._background.settle()
        return (yield)

    def _settle(self, state: State) -> None:
        self._background.settle()

    # Before workers are forked, and before work that is slower while writes are watched.
    epoch_start = epoch_end = eval_before_all = fit_end = exception = _settle

    def eval_end(self, state: State) -> None:
        """There may be a new best."""
        assert state.eval_label is not None
        self._evaluated[state.eval_label] = _place(state)

    def batch_end(self, state: State) -> None:
        """A signal before this is heard after this batch, on all ranks: they agree on requests next."""
        if self._signals.received:
            state.request(Decision.CHECKPOINT)

    def batch_checkpoint(self, state: State) -> None:
        """Writes if it is due, asked for, or the best so far."""
        self._hidden.observe(state)
        asked, due, best = state.requests.take(Decision.CHECKPOINT), self._due(state), self._is_among_the_best(state)
        if asked or due or best:
            self._save(state)
        if asked and self._told_to_end(state):
            self._end(state)

    def epoch_checkpoint(self, state: State) -> None:
        """Writes if it is due, the best so far, or told to end since the last batch, as in an evaluation."""
        due, best, told = self._due(state), self._is_among_the_best(state), self._told_to_end(state)
        if due or best or told:
            self._save(state)
        if told:
            self._end(state)

    def after_fit(self, state: State) -> None:
        """Write how the fit ended, unless what was written after its last batch and evaluation says as much.

        Weights to publish are those that plug-ins leave at the end of the fit.
        """
        self._wait(state)
        self._check_metric(state)
        if self._weights_only or self._saved != self._moment(state):
            self._save(state)
        self._wait(state)
        self._signals.stop()
        self._release()
        if self._told_to_end(state):
            self._end(state)

    def close(self, state: State) -> None:
        """Waits for what is being written."""
        self._signals.stop()
        self._background.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            warnings.warn(f"{_NOT_WRITTEN.format(self.store)} {failure}", RuntimeWarning, stacklevel=2)
        self._release()

    def _release(self) -> None:
        """From here to the next fit others may write."""
        if self._writes_alone:
            self._writes_alone = False
            with seeding.preserved(devices=False):
                self._owned.note()
                self.store.release()

    def _told_to_end(self, state: State) -> bool:
        """Whether any rank was: every rank has to ask."""
        return any(state.bus.all_gather_object(self._signals.received))

    def _end(self, state: State) -> NoReturn:
        self._wait(state)
        self._signals.forget()
        raise Interrupted(EXIT_CODE)

    def _due(self, state: State) -> bool:
        if not self._in_shares:
            return self._every.due(state.previous, state.timestamp)
        before, self._share = self._share, state.elapsed()
        return self._every.due(state.previous, state.timestamp, before, self._share)

    # --- the best

    def _is_new(self, state: State, metric: str) -> bool:
        """Whether a metric is of an evaluation right here: of its set or, like those of training, of any."""
        here = [label for label, place in self._evaluated.items() if place == _place(state)]
        its = [label for label in state.eval_sets if metric.startswith(f"{label}/")]
        return max(its, key=len) in here if its else bool(here)

    def _check_metric(self, state: State) -> None:
        metric = self._retention.metric
        if metric is not None and self._is_new(state, metric) and metric not in state.metrics:
            there = ", ".join(sorted(state.metrics)) or "none"
            raise ValueError(
                f"Checkpoints should keep the best by '{metric}', but there is no such metric. There are: {there}."
            )

    def _is_among_the_best(self, state: State) -> bool:
        metric = self._retention.metric
        if metric is None or not self._is_new(state, metric):
            return False
        self._check_metric(state)
        self._wait(state)  # for the writer, which also removes
        leads = self._leads(state.metrics) if state.strategy.rank == 0 else None
        leads = bool(state.bus.broadcast_object(leads))
        self._speak(state)
        return leads

    def _leads(self, metrics: Mapping[str, float]) -> bool:
        try:
            with seeding.preserved(devices=False):
                return self._retention.leads(metrics, self._owned.own)
        except (CheckpointError, OSError) as error:
            self._failure = error
            return False

    # --- what

    def _save(self, state: State) -> None:
        now = state.timestamp
        self._wait(state)
        if not state.content.worth_saving():
            return
        if self._weights_only:
            model = by_own_names(state, state.bus.model_shards(state.prepared))
            tree: Any = {"model": model, "attached": described(state.bus.attachments)}
        else:
            tree = state.content.state_dict(gather=False)
            self._hidden.warn(state)
        self.note_saved(state)
        snapshot = Snapshot(tree, state.strategy.rank)
        ranks = self._writers(state, snapshot)
        if ranks is not None:
            about = {
                "metrics": dict(state.metrics), "evaluated": [each for each in state.metrics if self._is_new(state, each)],
                "timestamp": {"epoch": now.epoch, "batch": now.batch, "sample": now.sample},
                "plugins": [f"{v.kind}/{v.name} {v.dist} {v.version}".strip() for v in state.bus.attachments],
                "weights_only": self._weights_only, "run": self._owned.about(),
            }  # fmt: skip
            arguments = (f"ep{now.epoch}-ba{now.batch}", snapshot, about, ranks)
            if self._asynchronous:
                self._background.start(state, snapshot, functools.partial(self._write, *arguments))
            else:
                with seeding.preserved(devices=False):  # remote stores draw from them when they have to try again
                    self._write(*arguments)
        if not self._asynchronous:
            self._speak(state)

    def note_saved(self, state: State) -> None:
        """The store has what the state is now."""
        self._saved = self._moment(state)

    def _moment(self, state: State) -> tuple[int, dict[str, tuple[int, int]]]:
        return state.timestamp.batch, dict(self._evaluated)

    def _writers(self, state: State, snapshot: Snapshot) -> Ranks | None:
        """Who writes: every rank where there are shards, else rank 0; None on those that do not."""
        strategy = state.strategy
        if not snapshot.sharded:
            return Ranks() if strategy.rank == 0 else None
        if not self._asynchronous:
            return Ranks(strategy.rank, strategy.world_size, state.bus.all_gather_object)
        if self._threads is None:
            self._threads = of_a_thread(strategy.rank, strategy.world_size)
        return self._threads

    def _write(
        self, name: str, snapshot: Snapshot, about: dict[str, Any], ranks: Ranks, problem: Exception | None = None
    ) -> None:
        try:
            ranks.agree(lambda: _raise_if(problem))
            self.store.save(name, snapshot, about, ranks, self._owned.may_replace)
            if ranks.rank == 0:
                self._owned.written(name)
                for old in self._retention.superfluous(self._owned.own):
                    self.store.remove(old)
        except Exception as error:
            self._failure = error

    def _wait(self, state: State) -> None:
        """Until what is being written is written, on all ranks."""
        if self._asynchronous:
            self._background.join()
            self._speak(state)

    def _speak(self, state: State) -> None:
        failure, self._failure = self._failure, None
        told = state.bus.broadcast_object(None if failure is None else f"{type(failure).__name__}: {failure}")
        if told is None:
            return
        self._saved = None
        message = f"{_NOT_WRITTEN.format(self.store)} {told}"
        if self._on_error == "stop":
            raise CheckpointError(message) from failure
        warnings.warn(f"{message} Training goes on without it.", RuntimeWarning, stacklevel=2)


_NOT_WRITTEN = "A checkpoint could not be written to {}:"


def _raise_if(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _place(state: State) -> tuple[int, int]:
    return state.timestamp.epoch, state.timestamp.batch
