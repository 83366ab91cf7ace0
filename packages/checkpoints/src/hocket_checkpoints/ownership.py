"""Determine which run owns which checkpoints of a store. A run overwrites, removes and ranks only its own."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.basics.run_folder import Run
from hocket.errors import CheckpointError
from hocket_checkpoints.storage.locks import InUse
from hocket_checkpoints.storage.store import Store

#: Names that runs give their checkpoints. No run removes copies under other names.
NAME = re.compile(r"ep\d+-ba\d+")


class Ownership:
    """Know which checkpoints of a store belong to a run, and refuse a run that would destroy those of other runs.

    A checkpoint belongs to the run whose identity is in its manifest. Checkpoints of older versions have no identity: they
    belong to the run that was resumed from one of them.

    Args:
        overwrite: replace conflicting checkpoints: `begin` and `resume` announce it, and `written` removes them.
    """

    def __init__(self, store: Store, overwrite: bool) -> None:
        self._store, self._overwrite = store, overwrite
        self._run = Run("", "")
        self._resumed = False
        #: When the newest known checkpoint of this run was written.
        self._newest = 0.0
        #: The checkpoints to replace, until they are removed.
        self._replaced: set[str] = set()
        #: Whether this process holds the store's lock: on rank 0, during a fit.
        self._locked = False

    # --- at the beginning of a run

    def begin(self, run: Run, readable: bool = True) -> None:
        """Begin a new run. Raises CheckpointError if there are checkpoints of other runs.

        Args:
            readable: whether one of them can be resumed from, for the message.
        """
        there = self._there()
        problem = f"{self._store} has checkpoints of {_whose(there.values())}: {_list(there)}"
        problem += ". A new run never mixes with them." if readable else ", and none that can be resumed from."
        self._replaced = self._displace(there, problem, readable)
        self._run, self._resumed, self._newest = run, False, 0.0

    def resume(self, run: Run, name: str, newest: bool, elsewhere: str | None = None) -> None:
        """Continue a run from its checkpoint ``name`` in this store.

        Raises CheckpointError if other checkpoints of this run were written after it, unless ``newest``: then those are
        damaged. Raises it too if the run continued ``elsewhere``, the store that it wrote to before, or is writing there.
        """
        self._run, self._resumed, self._replaced = run, True, set()
        taken = self._store.about(name)["written"]
        if elsewhere is not None and (why := self._continued(elsewhere, taken)):
            raise CheckpointError(
                f"{self._store} is a copy of {elsewhere}, {why}. A run continues in one of them, and logs to one folder. For a "
                f"second run that begins here, pass «resume='{self._store.folder}/{name}'» and another folder as "
                f"«checkpoints=»; if the other is not needed, remove it."
            )
        if not newest:
            later = [each for each, about in self.own().items() if about["written"] > taken]
            problem = f"{self._store} has checkpoints of this run that were written after '{name}': {_list(later)}."
            self._replaced = self._displace(later, problem)
        self.note()

    def _continued(self, elsewhere: str, taken: float) -> str:
        """Return how the run continued elsewhere since then, or empty if it did not."""
        try:
            there = Store(elsewhere)
            its = {name: about for name, about in there.abouts().items() if self._has(about)}
            if later := [name for name, about in its.items() if about["written"] > taken]:
                return f"from which the run continued to {_list(later)}"
            if its:
                there.acquire(self._run.name)
                there.release()
        except InUse:
            return "which the run is writing to now"
        except (CheckpointError, OSError, ImportError, ValueError):  # removed, or unreachable
            pass
        return ""

    def _displace(self, names: Iterable[str], problem: str, readable: bool = True) -> set[str]:
        names = list(names)
        if names and not self._overwrite:
            resume = "To continue from the newest, pass «resume='auto'»; to" if readable else "To"
            raise CheckpointError(
                f"{problem} {resume} keep them, another folder; to replace them, "
                f"«checkpoints=hocket.Checkpoints({str(self._store.folder)!r}, overwrite=True)¦checkpoints={{'folder': "
                f"{str(self._store.folder)!r}, 'overwrite': True}}»."
            )
        if names:
            said = (
                f"overwrite=True: this run replaces {_list(names)} in {self._store} once it has written a checkpoint."
            )
            print(f"hocket: {said}", file=sys.stderr, flush=True)
        return set(names)

    # --- while it runs

    def acquire(self, run: str, writable: bool) -> None:
        """Keep other runs from writing here until :meth:`release`; ``run`` is shown to them.

        Raises CheckpointError if another run is writing here or has written here since this run last checked; and with
        ``writable``, if the store cannot be written to.
        """
        problem = self._store.acquire(run)
        try:
            if problem is not None and writable:
                raise CheckpointError(
                    f"No checkpoint can be written to {self._store.where}: {problem}. Make it a folder that this user may "
                    "write to, or give another: «checkpoints=hocket.Checkpoints('…')¦checkpoints=…»."
                )
            self._check()
        except BaseException:
            self._store.release()
            raise
        self._locked = True

    def release(self) -> None:
        """Let other runs write until the next :meth:`acquire`."""
        if self._locked:
            self._locked = False
            self.note()
            self._store.release()

    def _check(self) -> None:
        news = [
            name
            for name, about in self._there().items()
            if name not in self._replaced
            and (about["written"] > self._newest if about and self._has(about) else not self._resumed)
        ]
        if news:
            raise CheckpointError(
                f"{self._store} has checkpoints that were written after this Trainer was made, by another: {_list(news)}. Make "
                "the Trainer again, with «resume='auto'» to continue from the newest, or with another folder."
            )

    def note(self) -> None:
        """Record the current checkpoints as known to this run."""
        try:
            self._newest = max((about["written"] for about in self.own().values()), default=0.0)
        except (CheckpointError, OSError):  # the store is unreachable: later checkpoints are assumed to be this run's
            self._newest = math.inf

    def about(self) -> dict[str, str]:
        """Return the identity that checkpoints of this run record."""
        return {"id": self._run.id, "name": self._run.name}

    def own(self) -> dict[str, dict[str, Any]]:
        """Return the description of each checkpoint of this run, oldest first, without those to be replaced."""
        there = self._there()
        return {
            name: about for name, about in there.items() if about and self._has(about) and name not in self._replaced
        }

    def may_replace(self, name: str, about: Mapping[str, Any] | None) -> bool:
        """Whether this run may replace a checkpoint; ``about`` is its description, None if it is unreadable."""
        return name in self._replaced or self._has(about)

    def written(self, name: str) -> None:
        """Remove the checkpoints that this run replaces, now that it has written one."""
        while self._replaced:
            if (other := self._replaced.pop()) != name:
                self._store.remove(other)

    def _there(self) -> dict[str, dict[str, Any] | None]:
        """Return the checkpoints of all runs, oldest first; None for those that cannot be read."""
        return {name: about for name, about in self._store.existing().items() if NAME.fullmatch(name)}

    def _has(self, about: Mapping[str, Any] | None) -> bool:
        if about is None or "run" not in about:
            return self._resumed
        return isinstance(about["run"], dict) and about["run"].get("id") == self._run.id


def _whose(abouts: Iterable[Mapping[str, Any] | None]) -> str:
    named = {str(about["run"]["name"]) for about in abouts if about and isinstance(about.get("run"), dict)}
    return f"run {', '.join(map(repr, sorted(named)))}" if named else "another run"


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names if len(names) <= 4 else [*names[:2], f"… ({len(names) - 3} more)", names[-1]])
