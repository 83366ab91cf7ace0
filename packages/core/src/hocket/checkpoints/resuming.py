"""Continue a run from a checkpoint: which one, whose it is, and what is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.checkpoints import content
from hocket.checkpoints.errors import CheckpointError
from hocket.checkpoints.manifest import LATEST
from hocket.checkpoints.ranks import ranks_of
from hocket.checkpoints.store import Store
from hocket.run_folder import Run, RunFolder, check_name
from hocket.training import seeding

if TYPE_CHECKING:
    from hocket.checkpoints.policy import Checkpoints
    from hocket.trainer import Trainer


def resume(trainer: Trainer, where: str | Path, checkpoints: Checkpoints | None) -> None:
    """Make a new Trainer go on from a checkpoint: ``"auto"`` for the newest valid one of ``checkpoints``, if there is one.

    Raises:
        TypeError: neither text nor a path.
        ValueError: ``"auto"`` without checkpoints, or a checkpoint of weights only.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    if not isinstance(where, str | os.PathLike) or not os.fspath(where):
        raise TypeError(
            f"resume={where!r} is no checkpoint. Give 'auto' for the newest where checkpoints= writes, a checkpoint such as "
            "'runs/a/ep3-ba18', or None for a new run."
        )
    state, ranks = trainer.state, ranks_of(trainer.state)
    own = None if checkpoints is None else checkpoints.store
    if where == "auto":
        if checkpoints is None or own is None:
            raise ValueError(
                "resume='auto' looks where checkpoints are written; pass checkpoints=hocket.Checkpoints('runs/a') as well, or "
                "the folder of a checkpoint as resume=."
            )
        store = own
        with seeding.preserved(devices=False):
            found = store.read_latest(content.shards(trainer), ranks)
        if found is None:
            checkpoints.attach(trainer, fresh=True, readable=False)
            return
        name, tree = found
    else:
        path = str(where) if "://" in str(where) else os.path.realpath(where)
        folder, _, name = path.rstrip("/").rpartition("/")
        store = Store(folder or "/")
        store = own if own is not None and store.where == own.where else store
        with seeding.preserved(devices=False):
            name = ranks.first(lambda: _named(store, name, path))
        try:
            tree = store.read(name, like=content.shards(trainer), ranks=ranks)
        except CheckpointError as error:
            error.add_note(f"While going on from '{name}' in {store}.")
            raise
    if "version" not in tree:
        raise ValueError(
            f"'{name}' in {store} holds weights only, which is not enough to resume from. Leave out resume=, and give the "
            f"Trainer the weights to begin with: trainer.load_weights('{store.folder}/{name}')."
        )
    with seeding.preserved(devices=False):
        if checkpoints is not None and store is own:
            # Without an identity: of a version before there were any. From here on it has one.
            name_of_run = trainer.settings.run_name or check_name(tree["run_name"]) or state.run.name
            state.run = Run(str(tree.get("run_id", state.run.id)), name_of_run)
            state.folder = RunFolder(state.folder.path.parent, state.run, continues=True)
            checkpoints.resumed(state, name, newest=where == "auto")
        elif checkpoints is not None:  # a branch: a run of its own
            checkpoints.attach(trainer, fresh=True)
    try:
        content.load_state_dict(trainer, tree, strict=True, copy=False)
    except Exception as error:
        error.add_note(f"While going on from '{name}' in {store}.")
        raise
    if checkpoints is not None and store is own:
        checkpoints.note_saved(state)


def _named(store: Store, name: str, path: str) -> str:
    """The checkpoint that was meant: the file ``latest`` is the newest. Raises CheckpointError for a folder of several."""
    there = store.names()
    if name == LATEST and there:
        return there[-1]
    if name not in there and (several := Store(path).names()):
        raise CheckpointError(
            f"{path} has several checkpoints: {', '.join(several)}. Pass one of them, such as resume='{path}/{several[-1]}'; "
            f"or to go on in that folder from its newest, checkpoints=hocket.Checkpoints('{path}'), resume='auto'."
        )
    return name
