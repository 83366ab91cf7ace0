"""Decide when checkpoints are written and what they contain, and end the run after a signal."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

from torch import nn

from hocket.basics import seeding
from hocket.basics.dtensors import local
from hocket.basics.plain_data import encode
from hocket.basics.plugin_errors import PlanError
from hocket.basics.sparse_quantized import taken_apart
from hocket.basics.time import Interval, Time, TimeError
from hocket.errors import WrongValue
from hocket.help.arguments import understood
from hocket.hookspecs import hookimpl
from hocket.hookspecs.callback import Callback
from hocket.loop.agreement import ranks_of
from hocket.run.content import by_own_names
from hocket.state import conversions
from hocket.state.interval_due import Due
from hocket.state.requests import Decision
from hocket.state.state import State
from hocket_checkpoints import plugin_components, resuming
from hocket_checkpoints.components.plugins import described
from hocket_checkpoints.content import of_run
from hocket_checkpoints.frozen_weights import FrozenWeights
from hocket_checkpoints.listing import Listing
from hocket_checkpoints.metric_updates import Measured
from hocket_checkpoints.ownership import Ownership
from hocket_checkpoints.retention import Retention
from hocket_checkpoints.signals import Signals
from hocket_checkpoints.storage.store import Store
from hocket_checkpoints.storage.tensors import unstorable
from hocket_checkpoints.unsaved_state import UnsavedState
from hocket_checkpoints.writing import Writer


class Checkpoints(Callback):
    """Write checkpoints, from which a run continues as if it had never stopped: ``Trainer(checkpoints=Checkpoints("runs/a"))``.

    Every rank writes the shards that it holds, rank 0 the rest. A checkpoint is complete or does not exist, whenever a process
    dies. One is written at the end of a fit too. During a fit SIGTERM and SIGINT (Control-C) write one at the end of the
    current batch, epoch or fit, and end the run with `Interrupted`; another signal, a second or more after the first, ends it
    at once. In a notebook Control-C raises KeyboardInterrupt. ``Trainer(resume="auto")`` continues from the newest valid one.

    Args:
        folder: the target: any folder, or a URL that fsspec supports, such as ``"s3://bucket/runs/a"``. If ranks hold shards,
            all of them must be able to write to it.
        every: the interval: ``"500ba"``, ``"1ep"``, ``"0.1dur"``, ``"30min"``; None for only at the end and on request.
        keep: the number of latest checkpoints to keep; None for all. Copies under other names, and links, stay. A checkpoint
            at the end of an epoch replaces that of an interval after the same batch, which has the same weights.
        best: ``(metric, "max" | "min", number)``: after an evaluation in which the metric, such as ``"test/accuracy"``, is
            among the best ``number``, write a checkpoint, and keep those. A value that a plug-in logs with ``state.log`` is
            looked at after each evaluation and each epoch in which it was logged.
        asynchronous: write in a thread. Tensors that optimizers change are copied while the gradients of the next batch are
            computed, the rest immediately. The memory of the copies is reused. If a write takes longer than the interval,
            training waits for it.
        weights_only: write only model weights and the descriptions of attached plug-ins; to publish, not to resume.
        only: ``"trainable"`` omits frozen parameters that have not changed since the model was constructed, as of a model with
            adapters; one line says how many. A resumed run loads the rest over its model as constructed.
        on_error: how to handle a failed write: ``"stop"`` the run, or ``"warn"`` and continue.
        overwrite: replace the checkpoints of an older run that a new one finds there, or the later ones of a run that is
            resumed from an earlier one. One line lists them; they are removed once there is a new checkpoint. Without it, such
            a run is refused.
        requeue: under SLURM, also after SIGUSR1, put the job back into the queue once the checkpoint is written, by
            ``scontrol requeue``; not after Control-C. The Trainer needs ``resume="auto"``.

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

    @understood
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
        requeue: bool = False,
        only: Literal["trainable"] | None = None,
    ) -> None:
        if only not in (None, "trainable"):
            raise WrongValue(f"«only={only!r}» is neither 'trainable' nor «None».")
        self._only = only
        #: The frozen weights, of which only changed ones are saved; None to save all weights.
        self._frozen: FrozenWeights | None = None
        self._retention = Retention(keep, best)
        if on_error not in ("stop", "warn"):
            raise WrongValue(f"«on_error={on_error!r}» is neither 'stop' nor 'warn'.")
        _check_folder(folder)
        self.store = Store(conversions.path(folder))
        self._owned = Ownership(self.store, overwrite)
        #: What this run has written so far.
        self.listing = Listing(self.store, self._owned, self._retention, resumable=not weights_only)
        self._due = Due(every)
        self._weights_only, self._on_error = weights_only, on_error
        self._new_writer = functools.partial(Writer, self.store, self._owned, self._retention, asynchronous, on_error)
        self._state: Callable[[], State | None] = lambda: None
        self._measured = Measured(self._retention.metric)
        #: Seconds for which training has waited for checkpoints so far.
        self.blocked_seconds = 0.0
        self._writer, self._unsaved, self._signals = self._new_writer(), UnsavedState(), Signals(requeue)
        self._requeue = requeue
        if asynchronous:  # otherwise save the microsecond that a wrapper takes in every step
            self.gradients = self._wait_before_the_step

    @hookimpl(tryfirst=True)
    def init(self, state: State) -> None:
        """Write this run's state from now on, and discard that of an earlier Trainer.

        Raises CheckpointError, on all ranks, if the run is new and there are checkpoints of other runs.
        """
        resume = state.identity.resumes
        if self._requeue and resume != "auto":
            raise WrongValue(
                f"Checkpoints(requeue=True) starts the job again, and {resume=} would not continue its run. "
                "Pass «resume='auto'» to the Trainer."
            )
        if resume is None:
            self.begin_run(state)
        self._state = weakref.ref(state)
        self._frozen = FrozenWeights() if (self._only or state.task.checkpoints_only) else None
        self._writer.close()
        self._measured = Measured(self._retention.metric)
        self._writer, self._unsaved = self._new_writer(), UnsavedState()

    def before_load(self, state: State) -> None:
        """Note the weights as constructed. Raises PlanError, if there is a tensor that checkpoints cannot hold."""
        for name, tensor in (*state.task.named_parameters(), *state.task.named_buffers()):
            mine = local(tensor.detach())
            kind = "" if nn.parameter.is_lazy(tensor) or mine.is_meta or taken_apart(mine) else unstorable(mine)
            if kind:
                raise PlanError(
                    f"«checkpoints={str(self.store.folder)!r}» cannot hold {name.removeprefix(state.model_prefix)} of "
                    f"{type(state.model).__name__}: it is a {kind}. Keep a plain or sparse tensor, or one of torch's affine "
                    "quantized ones, and convert it in forward; or keep it in an attribute that __init__ makes again, or "
                    "train without «checkpoints=»."
                )
        if self._frozen is not None:
            self._frozen.construct(state)

    def resume(self, state: State, where: str | Path) -> bool:
        """Continue the run of a checkpoint of this store; begin a new run from a checkpoint elsewhere."""
        plugin_components.check(state)
        resuming.resume(state, where, self)
        return True

    def begin_run(self, state: State, readable: bool = True) -> None:
        """For `resuming`: this is a new run. See `Ownership.begin`."""
        with seeding.preserved(devices=False):
            ranks_of(state).first(lambda: self._owned.begin(state.run, readable))
        state.folder.take_over(self.store.where)

    def continue_run(self, state: State, name: str, newest: bool) -> None:
        """For `resuming`: the run continues from this checkpoint of the store; see `Ownership.resume`.

        Raises CheckpointError if the store is a copy, and the run continued from the original: its folder can follow only one.
        """
        elsewhere = state.folder.moved_from(self.store.where)
        ranks_of(state).first(lambda: self._owned.resume(state.run, name, newest, elsewhere))

    def before_fit(self, state: State) -> None:
        """Raise CheckpointError, on all ranks, if another run is writing here or has written.

        Raises PluginError for a plug-in or Task with a state that could be saved and not restored.
        """
        if not self._weights_only:
            plugin_components.check(state)
        of_run(state).configuration.take_changes()
        with seeding.preserved(devices=False):
            ranks_of(state).first(lambda: self._owned.acquire(state.run.name, writable=self._on_error == "stop"))

    # --- when

    def fit_start(self, state: State) -> None:
        """Handle signals from now on, in the main thread. Raises ValueError if these Checkpoints belong to a later Trainer."""
        if self._state() is not state:
            raise WrongValue(
                f"These Checkpoints in {self.store} were given to another Trainer after this one. Give each Trainer its own: "
                f"checkpoints=hocket.Checkpoints({str(self.store.folder)!r})."
            )
        self._due.fit_start(state)
        self._unsaved.begin(state)
        self._measured.fit_start(state)
        self._signals.listen()

    def eval_end(self, state: State) -> None:
        """Note the evaluation, which may be a new best."""
        self._measured.eval_end(state)

    def batch_end(self, state: State) -> None:
        """Request a checkpoint if a signal arrived."""
        self._signals.request_checkpoint(state)

    def batch_checkpoint(self, state: State) -> None:
        """Write a checkpoint if one is due, requested, or among the best; a signal has requested one in batch_end."""
        self._unsaved.observe(state)
        requested, due = state.requests.take(Decision.CHECKPOINT), self._due(state)
        best = self._is_among_the_best(state, epoch_ends=False)
        if requested or due or best:
            self._save(state)
        if requested and self._signals.anywhere(state):
            self._end(state)

    def is_due(self, state: State) -> bool:
        """For algorithms, in ``batch_checkpoint``: whether the interval is due after this batch."""
        return self._due.peek(state)

    def epoch_checkpoint(self, state: State) -> None:
        """Write a checkpoint if one is due, among the best, or if a signal arrived since the last batch."""
        due, best = self._due(state), self._is_among_the_best(state, epoch_ends=True)
        signaled = self._signals.anywhere(state)
        if due or best or signaled:
            self._save(state)
        if signaled:
            self._end(state)

    def after_fit(self, state: State) -> None:
        """Write the final state, unless a checkpoint was written after the last batch and evaluation.

        ``weights_only`` always writes, because plug-ins may change the weights at the end of the fit.
        """
        self._writer.wait(state)
        self._measured.check(state)
        if self._weights_only or self._writer.saved != self._moment(state):
            self._save(state)
        self._writer.wait(state)
        of_run(state).configuration.note()
        self._signals.stop()
        self._release()
        if self._signals.anywhere(state):
            self._end(state)

    def close(self, state: State) -> None:
        """Wait for the checkpoint that is being written."""
        self._signals.stop()
        self._writer.close()
        self._release()

    def _release(self) -> None:
        with seeding.preserved(devices=False):
            self._owned.release()

    def _end(self, state: State) -> NoReturn:
        self._writer.wait(state)
        self._signals.end(state)

    def _is_among_the_best(self, state: State, epoch_ends: bool) -> bool:
        if not self._measured.ranks(state, epoch_ends):
            return False
        self._writer.wait(state)  # because it also removes checkpoints
        leads = False
        if state.strategy.rank == 0:
            with self._writer.recorded(), seeding.preserved(devices=False):
                leads = self._retention.leads(self._measured.values(state), self._owned)
        leads = bool(state.bus.broadcast_object(leads))
        self._writer.report(state)
        return leads

    # --- waiting for the copies of an asynchronous checkpoint

    @hookimpl(wrapper=True)
    def _wait_before_the_step(self) -> Generator[None, bool, bool]:
        """Wait after the gradients, before weights change: an interrupt here leaves the batch to the next fit."""
        computed = yield
        with self._timed():
            self._writer.settle()
        return computed

    def _wait(self, state: State) -> None:
        """Wait before workers are forked, and before work that is slower while writes are watched."""
        with self._timed():
            self._writer.settle()

    epoch_start = epoch_end = eval_before_all = fit_end = exception = _wait

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_seconds += time.perf_counter() - began

    # --- what

    def _save(self, state: State) -> None:
        with self._timed():
            self._save_untimed(state)

    def _save_untimed(self, state: State) -> None:
        now = state.timestamp
        self._writer.wait(state)
        if not of_run(state).worth_saving():
            return
        state.bus.flush(state)  # a run that resumes here does not log these values again
        omitted: dict[str, Any] = {}
        if self._weights_only:
            model = encode(by_own_names(state, state.bus.model_shards(state.prepared)), "the model", gather=False)
            tree: dict[str, Any] = {"model": model, "attached": described(state.bus.attachments)}
        else:
            tree = of_run(state).state_dict(gather=False)
            self._unsaved.warn(state)
        if self._frozen is not None:
            prefix = state.model_prefix if self._weights_only else ""
            tree["model"], omitted = self._frozen.split(state, tree["model"], prefix, self.store.where)
            if not self._weights_only:
                tree["omitted"] = omitted
        about = {
            "metrics": self._measured.values(state),
            "evaluated": [name for name in self._measured.values(state) if self._measured.is_new(state, name)],
            "ranked_by": self._retention.rule and list(self._retention.rule),
            "timestamp": {"epoch": now.epoch, "batch": now.batch, "sample": now.sample},
            "plugins": [f"{v.kind}/{v.name} {v.dist} {v.version}".strip() for v in state.bus.attachments],
            "weights_only": self._weights_only, "omitted": list(omitted), "run": self._owned.about(),
        }  # fmt: skip
        self._writer.write(state, f"ep{now.epoch}-ba{now.batch}", tree, about, self._moment(state))

    def note_saved(self, state: State) -> None:
        """For `resuming`: the store has the current state."""
        self._writer.saved = self._moment(state)

    def _moment(self, state: State) -> tuple[int, dict[str, tuple[int, int]]]:
        """Return the batch and the evaluations until now, after which nothing is left to save."""
        return state.timestamp.batch, dict(self._measured.evaluated)


def _check_folder(folder: object) -> None:
    """Raise ValueError for a file, and for an interval, unless there is a folder of this name."""
    if isinstance(folder, str | Path) and os.path.isfile(folder):
        raise WrongValue(
            f"«checkpoints={str(folder)!r}» is a file, and checkpoints need a folder. Write «checkpoints='runs/a'»."
        )
    if isinstance(folder, str) and not os.path.lexists(folder):
        with suppress(TimeError):
            Time.parse(folder)
            raise WrongValue(
                f"«checkpoints={folder!r}» is an interval, and checkpoints need a folder. Write "
                f"«checkpoints=hocket.Checkpoints('runs/a', every={folder!r})¦checkpoints={{'folder': 'runs/a', 'every': "
                f"{folder!r}}}»; for a folder of this name, './{folder}'."
            )
