"""How loggers are called, so that none of them stops a run or slows it down."""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hocket.hookspecs import Loggers, StrategyHooks
from hocket.plugins.spec import Attachment

#: Calls that wait for a logger's thread; later ones are dropped.
_WAITING = 1000
#: Seconds after which a thread without work ends.
_IDLE = 1.0
#: What can be read from a copy of the state: no batch is in progress. Loggers with hooks beyond these are called in place.
_BETWEEN_BATCHES = {name for name in vars(Loggers) if not name.startswith("_")} | {
    "fit_start", "fit_end", "epoch_start", "epoch_end", "eval_standalone_start", "eval_standalone_end", "eval_before_all",
    "eval_start", "eval_end", "eval_after_all", "predict_start", "predict_end", "exception", "close",
}  # fmt: skip
_COLLECTIVES = {name for name in vars(StrategyHooks) if not name.startswith("_")}


class LoggerWarning(UserWarning):
    """A logger raised or was too slow, and what it should have written is lost."""


class Delivery:
    """Calls the hooks of one logger, in order. Exceptions become a warning, the first time, and a count of dropped rows.

    A logger that only writes down is called in a thread, with a copy of the state; `finish` waits for it. One that declares
    itself ``synchronous``, has ``all_ranks`` or takes part in batches is called in place.
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
        self._told = False
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._calls: deque[tuple[str, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._thread: threading.Thread | None = None
        self._ending = False
        #: The hook that the thread is in.
        self._busy = ""
        self._dropped = self._written = 0
        #: How much was written when waiting was given up; until there is more, nobody waits again.
        self._stuck_at = -1
        self._message = ""
        self._leaving: BaseException | None = None

    def of(self, hook: str, function: Callable[..., Any]) -> Callable[..., None]:
        """``function``, the logger's own, as the run calls it."""
        if self.synchronous:

            def call(*args: Any) -> None:
                try:
                    function(*args)
                except Exception as error:
                    self._failed(hook, error)
                    self._speak()

        else:

            def call(*args: Any) -> None:
                self._put(hook, function, args)

        return call

    def finish(self, closing: bool) -> None:
        """Wait for what was not written yet, ``deadline`` seconds at most, and say what was dropped.

        Args:
            closing: whether to drop what is not written by then, instead of leaving it to the thread.
        """
        if self._process == os.getpid() and (thread := self._thread):
            with self._changed:
                late = self._stuck_at != self._written and not self._changed.wait_for(self._idle, self._deadline)
                waiting = sum(hook.startswith("log_") for hook, *_ in self._calls)
                if late:
                    self._stuck_at = self._written
                    self._say(
                        f"{self._who} is still in {self._busy}() after {self._deadline:g} s, with {waiting} rows to write. "
                        "Nobody waits for it any longer; what is not written when it is closed is dropped."
                    )
                if closing:
                    self._calls.clear()
                    self._dropped += waiting
                    self._ending = True
                    self._changed.notify_all()
            if closing and not self._busy:
                thread.join()
        if self._dropped:
            rows = "1 row" if self._dropped == 1 else f"{self._dropped} rows"
            self._say(f"{self._who} does not have everything: {rows} dropped.")
            self._dropped = 0
        self._speak()

    # --- the thread

    def _put(self, hook: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self._process != os.getpid():  # a fork, without the thread
            self._begin()
        state, *rest = args
        snapshot = getattr(state, "snapshot", None)
        taken = (state if snapshot is None else snapshot(_Reading), *map(_copied, rest))
        with self._changed:
            self._ending = False
            if len(self._calls) < _WAITING:
                self._calls.append((hook, function, taken))
                self._changed.notify_all()
            else:
                self._dropped += hook.startswith("log_")
                self._warn_once(f"{self._who} is slower than training: {_WAITING} calls wait for it.")
            if self._thread is None:
                self._start()
        self._speak()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=f"hocket {self._who}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends
            self._thread = None
            while self._calls:
                self._call(*self._calls.popleft())

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._ending, _IDLE)
                if not self._calls:
                    self._thread = None
                    return
                hook, function, args = self._calls.popleft()
                self._busy = hook
            self._call(hook, function, args)
            del args
            with self._changed:
                self._busy = ""
                self._written += 1
                self._changed.notify_all()

    def _call(self, hook: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except Exception as error:
            self._failed(hook, error)
        except BaseException as error:  # sys.exit: leaves where the run is
            self._leaving = error

    def _idle(self) -> bool:
        return not self._calls and not self._busy

    # --- what went wrong

    def _failed(self, hook: str, error: Exception) -> None:
        with self._changed:
            self._dropped += hook.startswith("log_")
        at = traceback.extract_tb(error.__traceback__)[-1]
        self._warn_once(f"{self._who} raised {type(error).__name__} in {hook}(): {error} ({at.filename}:{at.lineno}).")

    def _warn_once(self, what: str) -> None:
        if not self._told:
            self._told = True
            self._say(f"{what} Training goes on; rows that this logger does not write are dropped and counted.")

    def _say(self, message: str) -> None:
        with self._changed:
            self._message = f"{self._message} {message}".lstrip()

    def _speak(self) -> None:
        """In the thread of the run, where warnings can be made errors."""
        if self._message:
            with self._changed:
                message, self._message = self._message, ""
            warnings.warn(message, LoggerWarning, stacklevel=3)
        if self._leaving is not None:
            leaving, self._leaving = self._leaving, None
            raise leaving


class _Reading:
    """A bus for a logger's thread: no collectives, which other ranks and the run's own thread would not expect."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        if name in _COLLECTIVES:
            raise RuntimeError(
                f"{name} is called by all ranks at once, and a logger on rank 0, in a thread. Set all_ranks = True in "
                "the logger's class: it is then called in place, on every rank."
            )
        return getattr(self._bus, name)


def _copied(argument: Any) -> Any:
    """Containers and tensors copied: the caller may write into them before the thread has read them."""
    if isinstance(argument, Mapping):
        return {key: _copied(value) for key, value in argument.items()}
    if isinstance(argument, list | tuple):
        return [_copied(value) for value in argument]
    return argument.detach().clone() if hasattr(argument, "detach") else argument
