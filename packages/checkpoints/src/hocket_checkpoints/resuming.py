"""Continue a run from a checkpoint: find it, determine which run owns it, and load it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.basics import seeding
from hocket.basics.run_folder import Run, RunFolder, check_name, is_url
from hocket.errors import CheckpointError, WrongType, WrongValue
from hocket.help import warn
from hocket.loop.agreement import ranks_of
from hocket.state.ranks import Ranks
from hocket_checkpoints.content import of_run
from hocket_checkpoints.storage.manifest import LATEST
from hocket_checkpoints.storage.store import Store
from hocket_checkpoints.weight_differences import some

if TYPE_CHECKING:
    from hocket.state.state import State
    from hocket_checkpoints.periodic_saving import Checkpoints


#: What to write if there is no checkpoint, by the argument.
_INSTEAD = {
    "resume=": "'auto' with checkpoints=, or None for a new run.",
    "checkpoint=": "'best' or 'latest' of this run's checkpoints, or the path of one.",
}


def resume(state: State, where: str | Path, checkpoints: Checkpoints | None = None) -> None:
    """Make a new run continue from a checkpoint: ``"auto"`` for the newest valid one of ``checkpoints``, if there is one.

    Raises:
        TypeError: neither text nor a path.
        ValueError: ``"auto"`` without checkpoints, or a checkpoint of weights only.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    check(where, checkpoints is not None)
    ranks = ranks_of(state)
    own = None if checkpoints is None else checkpoints.store
    if where != "auto":
        where = _of_a_folder(where, ranks)
    if where == "auto":
        assert checkpoints is not None and own is not None
        store = own
        with seeding.preserved(devices=False):
            found = store.read_latest(of_run(state).like(), ranks)
        if found is None:
            if state.strategy.rank == 0:
                line = (
                    f"resume='auto': there is no checkpoint in {store.where} yet{_instead(store)}, so a new run begins"
                )
                print(f"hocket: {line}", file=sys.stderr, flush=True)
            checkpoints.begin_run(state, readable=False)
            return
        name, tree = found
    else:
        with seeding.preserved(devices=False):
            store, name = locate(where, own, ranks)
        try:
            tree = store.read(name, like=of_run(state).like(), ranks=ranks)
        except CheckpointError as error:
            error.add_note(f"While resuming from '{name}' in {store}.")
            raise
    if "version" not in tree:
        raise WrongValue(
            f"'{name}' in {store} holds weights only, which is not enough to resume from. Omit «resume=», and begin with these "
            f"weights: trainer.load_weights('{store.folder}/{name}')."
        )
    with seeding.preserved(devices=False):
        if checkpoints is not None and store is own:
            # Checkpoints of older versions have no run identity; from here on the run has one.
            named = None if state.run.made_up else state.run.name
            saved = check_name(tree["run_name"])
            if named and saved and named != saved and state.strategy.rank == 0:
                line = f"'{name}' in {store} is of run {saved!r}, which continues under the name {named!r}"
                print(f"hocket: {line}. For a run of its own, give another folder of checkpoints.", file=sys.stderr)
            run_name = named or saved or state.run.name
            state.identity.run = run = Run(str(tree.get("run_id", state.run.id)), run_name)
            state.identity.folder = RunFolder(state.folder.path.parent, run, continues=True)
            checkpoints.continue_run(state, name, newest=where == "auto")
        elif checkpoints is not None:  # a branch: a run of its own
            checkpoints.begin_run(state)
    try:
        of_run(state).load_state_dict(tree, strict=True, copy=False)
    except Exception as error:
        error.add_note(
            f"While resuming from '{name}' in {store}. resume= loads all parts of a checkpoint; to begin a run with its "
            f"weights only, omit resume= and call trainer.load_weights('{store.folder}/{name}')."
        )
        raise
    state.identity.resumed_from = f"{str(store.folder).rstrip('/')}/{name}"
    if checkpoints is not None and store is own:
        checkpoints.note_saved(state)


def _instead(store: Store) -> str:
    """Return what a local folder has that is no checkpoint; empty for an empty one and for a URL."""
    with suppress(OSError):
        names = sorted(name for name in os.listdir(store.where) if not name.startswith("."))
        return f", only {some(names, 6)}" if names else ""
    return ""


def check(where: str | Path, searches: bool) -> None:
    """Raise TypeError, ValueError or CheckpointError, as `resume`, for what cannot be a checkpoint. Nothing is read.

    Args:
        searches: whether there are checkpoints of the run to search.
    """
    if not isinstance(where, str | os.PathLike) or not os.fspath(where):
        raise WrongType(
            f"«resume={where!r}» is not a checkpoint. Give 'auto' for the newest in the folder of «checkpoints=», a checkpoint "
            "such as 'runs/a/ep3-ba18', or «None» for a new run."
        )
    if where in ("latest", "best") and not os.path.lexists(where):
        raise CheckpointError(
            f"«resume={where!r}» is not the path of a checkpoint. Write «resume='auto'» for the newest in the folder of "
            "«checkpoints=», or a path such as 'runs/a/ep3-ba18'; result.best.path is that of the best."
        )
    if where == "auto" and not searches:
        raise WrongValue(
            "«resume='auto'» searches the folder of «checkpoints=»; pass "
            "«checkpoints=hocket.Checkpoints('runs/a')¦checkpoints='runs/a'» as well, or the folder of a checkpoint as "
            "«resume=»."
        )


def locate(where: str | Path, own: Store | None, ranks: Ranks, write: str = "resume=") -> tuple[Store, str]:
    """Return the store, ``own`` if it is that one, and the name of a checkpoint by its path or URL. Every rank calls it.

    Args:
        write: the argument, for the advice of an error.
    """
    path = str(where) if is_url(where) else os.path.realpath(where)
    folder, _, name = path.rstrip("/").rpartition("/")
    store = Store(folder or "/")
    store = own if own is not None and store.where == own.where else store
    return store, ranks.first(lambda: _named(store, name, path, write))


def _named(store: Store, name: str, path: str, write: str) -> str:
    """Return the name of the checkpoint; the file ``latest`` stands for the newest. Raises CheckpointError for a store."""
    there, name = store.names(), store.named(name)
    if name not in there and not os.path.isdir(path):  # a folder is a damaged one, of which reading says what is wrong
        raise CheckpointError(
            f"{store} has no checkpoint '{name}'; it has {', '.join(there) or 'none'}. Write {write}"
            + (f"'{store.folder}/{there[-1]}'." if there else _INSTEAD[write])
        )
    return name


def _of_a_folder(where: str | Path, ranks: Ranks) -> str | Path:
    """Return the newest checkpoint of a folder of checkpoints, with a warning, and any other path unchanged."""
    path = str(where).rstrip("/")
    with seeding.preserved(devices=False):
        folder, _, name = path.rpartition("/")
        names = ranks.first(
            lambda: [] if name == LATEST or name in Store(folder or ".").names() else Store(path).names()
        )
    if not names:
        return where
    warn(
        f"«resume={str(where)!r}» is a folder of checkpoints; the run resumes from its newest, {names[-1]!r}. Write "
        f"«resume='{path}/{names[-1]}'», or «resume='auto'» with «checkpoints={path!r}»."
    )
    return f"{path}/{names[-1]}"
