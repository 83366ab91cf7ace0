"""Call loggers such that none of them stops a run or slows it down."""

from __future__ import annotations

import os
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hocket.errors import Mistake, WrongState
from hocket.help import warn
from hocket.hookspecs import Loggers, StrategyHooks
from hocket.hookspecs.attachment import Attachment

#: Maximum number of calls queued for a logger's thread; further calls are dropped.
_MAX_QUEUED = 1000
#: Seconds without work after which a logger's thread ends.
_IDLE_SECONDS = 1.0
#: Hooks that can work on a snapshot of the state, since no batch is in progress. A logger with any other hook is synchronous.
_BETWEEN_BATCHES = {name for name in vars(Loggers) if not name.startswith("_")} | {
    "fit_start", "fit_end", "epoch_start", "epoch_end", "eval_standalone_start", "eval_standalone_end", "eval_before_all",
    "eval_start", "eval_end", "eval_after_all", "predict_start", "predict_end", "exception", "close",
}  # fmt: skip
#: Hooks that carry nothing to write.
_EMPTY = {"flush", "close"}
_COLLECTIVES = {name for name in vars(StrategyHooks) if not name.startswith("_")}


class LoggerWarning(UserWarning):
    """A logger raised or was too slow, and some of its rows or events are lost."""


class RowsLostError(Mistake, OSError):
    """Rows that a logger collected could not be written.

    Attributes:
        rows: how many.
    """

    def __init__(self, cause: OSError, rows: int) -> None:
        super().__init__(str(cause))
        self.rows = rows


class Delivery:
    """Call the hooks of one logger, in order. The first exception becomes a warning; later ones only count what is dropped.

    By default a logger runs in its own thread, with a snapshot of the state, and `finish` waits for it. A logger is called
    synchronously if it sets ``synchronous`` or ``all_ranks``, or has hooks that are called while a batch is in progress.
    Consecutive rows of metrics that wait for the thread are passed together to a logger with ``log_rows``.
    """

    def __init__(self, attachment: Attachment, hooks: Iterable[str]) -> None:
        declared = getattr(attachment.obj, "synchronous", None)
        all_ranks = getattr(attachment.obj, "all_ranks", False)
        self.synchronous: bool = (
            all_ranks or not _BETWEEN_BATCHES.issuperset(hooks) if declared is None else bool(declared)
        )
        self._who = f"Logger '{attachment.name}'" + (
            f" of {attachment.dist} {attachment.version}" if attachment.dist else ""
        )
        self._deadline: float = getattr(attachment.obj, "deadline", 10.0)
        self._log_rows: Callable[..., Any] | None = getattr(attachment.obj, "log_rows", None)
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._calls: deque[tuple[str, Callable[..., Any], tuple[object, ...]]] = deque()
        self._thread: threading.Thread | None = None
        self._ending = False
        #: The hook that the thread is executing, or empty, and how much it was given to write.
        self._busy, self._in_progress = "", 0
        #: What is lost, by kind: rows, or events such as the end of a fit.
        self._dropped: Counter[str] = Counter()
        self._written = 0
        #: The value of `_written` at the last timeout; `finish` waits again only once it has grown.
        self._stuck_at = -1
        self._message = ""
        #: A BaseException such as KeyboardInterrupt, to be re-raised in the thread of the run.
        self._exit: BaseException | None = None

    def of(self, hook: str, function: Callable[..., Any]) -> Callable[..., None]:
        """Return the callable that the run calls in place of the logger's ``function``."""
        if self.synchronous:

            def call(*args: object) -> None:
                try:
                    function(*args)
                except Exception as error:
                    self._failed(hook, error, int(hook not in _EMPTY))
                    self._raise_pending()

        else:

            def call(*args: object) -> None:
                self._enqueue(hook, function, args)

        return call

    def finish(self, closing: bool) -> None:
        """Wait up to ``deadline`` seconds for pending calls, and warn about dropped rows and events.

        Args:
            closing: whether to drop calls that are still pending after the deadline, instead of leaving them to the thread.
        """
        unconfirmed = 0
        if self._process == os.getpid() and (thread := self._thread):
            with self._changed:
                late = self._stuck_at != self._written and not self._changed.wait_for(self._idle, self._deadline)
                waiting = Counter(_kind(hook) for hook, *_ in self._calls if hook not in _EMPTY)
                if late:
                    self._stuck_at = self._written
                    self._add_message(
                        f"{self._who} is still in {self._busy}() after {self._deadline:g} s, with {_amounts(waiting)} to "
                        "write. The run stops waiting for it; what is not written when the logger is closed is dropped."
                    )
                if closing:
                    self._calls.clear()
                    self._dropped += waiting
                    unconfirmed = self._in_progress
                    self._ending = True
                    self._changed.notify_all()
            if closing and not self._busy:
                thread.join()
        if self._dropped.total() or unconfirmed:
            further = f", and {unconfirmed} more may not have arrived" if unconfirmed else ""
            self._add_message(f"{self._who} is incomplete: {_amounts(self._dropped)} dropped{further}.")
            self._dropped.clear()
        self._raise_pending()

    # --- the thread

    def _enqueue(self, hook: str, function: Callable[..., Any], args: tuple[object, ...]) -> None:
        if self._process != os.getpid():  # a fork, which has no such thread
            self._reset()
        state, *rest = args
        snapshot = getattr(state, "snapshot", None)
        taken = (state if snapshot is None else snapshot(_BusWithoutCollectives), *map(_copied, rest))
        with self._changed:
            self._ending = False
            if len(self._calls) < _MAX_QUEUED:
                self._calls.append((hook, function, taken))
                self._changed.notify_all()
            else:
                self._dropped[_kind(hook)] += hook not in _EMPTY
                self._warn_once(f"{self._who} is slower than training: {_MAX_QUEUED} calls are queued for it.")
            if self._thread is None:
                self._start()
        self._raise_pending()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=f"hocket {self._who}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._thread = None
            while self._calls:
                self._call(*self._next())

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._ending, _IDLE_SECONDS)
                if not self._calls:
                    self._thread = None
                    return
                call = self._next()
                self._busy, _, _, self._in_progress = call
            self._call(*call)
            del call
            with self._changed:
                self._busy, self._in_progress = "", 0
                self._written += 1
                self._changed.notify_all()

    def _next(self) -> tuple[str, Callable[..., Any], tuple[object, ...], int]:
        """Take the next call from the queue, or the next rows of metrics as one call, and how many they are."""
        hook, function, args = self._calls.popleft()
        if hook != "log_metrics" or self._log_rows is None:
            return hook, function, args, int(hook not in _EMPTY)
        rows = [args]
        while self._calls and self._calls[0][0] == hook:
            rows.append(self._calls.popleft()[2])
        return "log_rows", self._log_rows, (rows,), len(rows)

    def _call(self, hook: str, function: Callable[..., Any], args: tuple[object, ...], rows: int) -> None:
        try:
            function(*args)
        except (Exception, SystemExit) as error:  # no signal arrives in this thread: a vendor's client calls sys.exit
            self._failed(hook, error, rows)
        except BaseException as error:  # such as Control-C: `_raise_pending` re-raises it in the thread of the run
            self._exit = error

    def _idle(self) -> bool:
        return not self._calls and not self._busy

    # --- errors

    def _failed(self, hook: str, error: BaseException, rows: int) -> None:
        with self._changed:
            if isinstance(error, RowsLostError):
                self._dropped["row"] += error.rows
            else:
                self._dropped[_kind(hook)] += rows
        at = traceback.extract_tb(error.__traceback__)[-1]
        self._warn_once(f"{self._who} raised {type(error).__name__} in {hook}(): {error} ({at.filename}:{at.lineno}).")

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._add_message(f"{what} Training continues; what this logger fails to write is dropped and counted.")

    def _add_message(self, message: str) -> None:
        with self._changed:
            self._message = f"{self._message} {message}".lstrip()

    def _raise_pending(self) -> None:
        """Emit pending warnings and exits in the thread of the run, where a filter may turn warnings into errors."""
        if self._message:
            with self._changed:
                message, self._message = self._message, ""
            warn(message, LoggerWarning)
        if self._exit is not None:
            pending, self._exit = self._exit, None
            raise pending


def _kind(hook: str) -> str:
    return "row" if hook.startswith("log_") else "event"


def _amounts(counts: Counter[str]) -> str:
    """Return ``"2 rows and 1 event"``; no rows are ``"0 rows"`` if there are no events either."""
    some = {kind: number for kind, number in sorted(counts.items(), reverse=True) if number} or {"row": 0}
    return " and ".join(f"{number} {kind}{'' if number == 1 else 's'}" for kind, number in some.items())


class _BusWithoutCollectives:
    """A bus for a logger's thread that refuses collectives: other ranks and the thread of the run would not match them."""

    def __init__(self, bus: object) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        if name in _COLLECTIVES:
            raise WrongState(
                f"{name} is a collective that all ranks have to call, but this logger runs on rank 0 only, in a thread. Set "
                "all_ranks = True in the logger's class: it is then called synchronously on every rank."
            )
        return getattr(self._bus, name)


def _copied(argument: object) -> object:
    """Copy containers and tensors: the caller may modify them before the thread reads them."""
    if isinstance(argument, Mapping):
        return {key: _copied(value) for key, value in argument.items()}
    if isinstance(argument, list | tuple):
        return [_copied(value) for value in argument]
    return argument.detach().clone() if hasattr(argument, "detach") else argument
