"""Whose checkpoints those in a store are. A run overwrites, removes and ranks only its own."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.checkpoints.storage.errors import CheckpointError
from hocket.checkpoints.storage.locks import InUse
from hocket.checkpoints.storage.store import Store
from hocket.run_folder import Run

#: Names that runs give their checkpoints. Copies under other names are nobody's to remove.
NAME = re.compile(r"ep\d+-ba\d+")


class Ownership:
    """Knows which checkpoints of a store belong to a run, and refuses to begin where that would cost others theirs.

    A checkpoint belongs to the run whose identity is in its manifest. Those of older versions have none: they belong to
    the run that was resumed from one of them.

    Args:
        overwrite: replace what is in the way: announced by `begin` and `resume`, and removed by `written`.
    """

    def __init__(self, store: Store, overwrite: bool) -> None:
        self._store, self._overwrite = store, overwrite
        self._run = Run("", "")
        self._resumed = False
        #: When the newest one of this run was written, as far as it knows.
        self._newest = 0.0
        #: What is replaced, until it is removed.
        self._replaced: set[str] = set()

    # --- at the beginning of a run

    def begin(self, run: Run, readable: bool = True) -> None:
        """Begin a new run. Raises CheckpointError if there are checkpoints of others; ``readable``: to resume from."""
        there = self._there()
        problem = f"{self._store} has checkpoints of {_whose(there.values())}: {_list(there)}"
        problem += ". A new run never mixes with them." if readable else ", and none that can be resumed from."
        self._replaced = self._displace(there, problem, readable)
        self._run, self._resumed, self._newest = run, False, 0.0

    def resume(self, run: Run, name: str, newest: bool, elsewhere: str | None = None) -> None:
        """Continue a run from its checkpoint ``name`` in this store.

        Raises CheckpointError if others of this run were written after it, unless ``newest``: then they are damaged. And if
        the run went on ``elsewhere``, where it wrote before, or is about to.
        """
        self._run, self._resumed, self._replaced = run, True, set()
        taken = self._store.about(name)["written"]
        if elsewhere is not None and (why := self._went_on(elsewhere, taken)):
            raise CheckpointError(
                f"{self._store} is a copy of {elsewhere}, {why}. A run goes on in one of them, and logs to one folder. For a "
                f"second run that begins here, pass resume='{self._store.folder}/{name}' and another folder as checkpoints=; "
                f"if the other is not needed, remove it."
            )
        if not newest:
            later = [each for each, about in self.own().items() if about["written"] > taken]
            problem = f"{self._store} has checkpoints of this run that were written after '{name}': {_list(later)}."
            self._replaced = self._displace(later, problem)
        self.note()

    def _went_on(self, elsewhere: str, taken: float) -> str:
        """How the run went on elsewhere since then, or empty if it did not."""
        try:
            there = Store(elsewhere)
            its = {name: about for name, about in there.abouts().items() if self._has(about)}
            if later := [name for name, about in its.items() if about["written"] > taken]:
                return f"from which the run went on to {_list(later)}"
            if its:
                there.acquire(self._run.name)
                there.release()
        except InUse:
            return "which the run is writing to now"
        except (CheckpointError, OSError, ImportError, ValueError):  # it is not there any more, or out of reach
            pass
        return ""

    def _displace(self, names: Iterable[str], problem: str, readable: bool = True) -> set[str]:
        names = list(names)
        if names and not self._overwrite:
            resume = "To continue from the newest, pass resume='auto'; to" if readable else "To"
            raise CheckpointError(
                f"{problem} {resume} keep them, another folder; to replace them, "
                f"checkpoints=hocket.Checkpoints({str(self._store.folder)!r}, overwrite=True)."
            )
        if names:
            said = (
                f"overwrite=True: this run replaces {_list(names)} in {self._store} once it has written a checkpoint."
            )
            print(f"hocket: {said}", file=sys.stderr, flush=True)
        return set(names)

    # --- while it runs

    def check(self) -> None:
        """Raise CheckpointError if another process has written here since this run looked last."""
        news = [
            name
            for name, about in self._there().items()
            if name not in self._replaced
            and (about["written"] > self._newest if about and self._has(about) else not self._resumed)
        ]
        if news:
            raise CheckpointError(
                f"{self._store} has checkpoints that were written after this Trainer was made, by another: {_list(news)}. Make "
                "the Trainer again, with resume='auto' to continue from the newest, or with another folder."
            )

    def note(self) -> None:
        """Remember that what is there now is known to this run."""
        try:
            self._newest = max((about["written"] for about in self.own().values()), default=0.0)
        except (CheckpointError, OSError):  # the store is gone for now: what is there later is taken to be this run's
            self._newest = math.inf

    def about(self) -> dict[str, str]:
        """What checkpoints of this run say of it."""
        return {"id": self._run.id, "name": self._run.name}

    def own(self) -> dict[str, dict[str, Any]]:
        """Return the description of each checkpoint of this run, oldest first, without the ones to be replaced."""
        there = self._there()
        return {
            name: about for name, about in there.items() if about and self._has(about) and name not in self._replaced
        }

    def may_replace(self, name: str, about: Mapping[str, Any] | None) -> bool:
        """Whether this run may write a checkpoint where there is one, which may be unreadable (None)."""
        return name in self._replaced or self._has(about)

    def written(self, name: str) -> None:
        """Remove the checkpoints that this run replaces, now that it has written one."""
        while self._replaced:
            if (other := self._replaced.pop()) != name:
                self._store.remove(other)

    def _there(self) -> dict[str, dict[str, Any] | None]:
        """The checkpoints of all runs, oldest first; None for those that cannot be read."""
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
