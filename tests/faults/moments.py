"""Moments at which a process kills itself, counted in function calls: a moment that failed can be had again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from hocket_checkpoints.storage.store import Store


@dataclass(frozen=True)
class Moment:
    """``rank`` kills itself before the so many-th function call, Python's or C's, inside of saves or outside of them."""

    inside: bool
    calls: int
    rank: int = 0


def _shared(kind: str) -> Any:
    return multiprocessing.RawValue(kind, 0)


@dataclass
class Watch:
    """In memory that outlives the process: whether it is saving, and how many calls it made, outside and inside of saves."""

    saving: Any = field(default_factory=lambda: _shared("b"))
    calls: tuple[Any, Any] = field(default_factory=lambda: (_shared("l"), _shared("l")))
    saves: Any = field(default_factory=lambda: _shared("l"))
    #: Calls until training began.
    set_up: Any = field(default_factory=lambda: _shared("l"))

    def start(self, moment: Moment | None) -> None:
        """Count, in this process and not in its forks, and kill it when it is time."""
        os.register_at_fork(after_in_child=lambda: sys.setprofile(None))
        fatal = [moment.calls if moment and moment.inside is inside else -1 for inside in (False, True)]

        def counting(inside: bool) -> Any:
            calls = self.calls[inside]
            last = fatal[inside]
            getpid, own = os.getpid, os.getpid()  # a fork counts until it has heard that it should not

            def count(frame: Any, event: str, argument: Any) -> None:
                if (event == "call" or event == "c_call") and getpid() == own:
                    if calls.value == last:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls.value += 1

            return count

        outside, inside = counting(False), counting(True)
        save = Store.save

        def announced(store: Store, *arguments: Any) -> None:
            self.saving.value = 1
            sys.setprofile(inside)
            try:
                save(store, *arguments)
            finally:
                # A thread of its own ends now; the main thread goes on counting what is outside.
                sys.setprofile(outside if threading.current_thread() is threading.main_thread() else None)
                self.saving.value = 0
                self.saves.value += 1

        Store.save = announced  # type: ignore[method-assign]
        sys.setprofile(outside)
