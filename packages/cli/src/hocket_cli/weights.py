"""What RUN and ``--weights`` name: a run, its newest checkpoint, another checkpoint, or a file of weights."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics.run_folder import is_url
from hocket_cli.document import ConfigError

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer
    from hocket_cli.recorded_config import Source


@contextmanager
def trainer_with_weights(
    args: argparse.Namespace, read: Source | None = None, **values: Any
) -> Iterator[tuple[Trainer, str | None]]:
    """Enter a Trainer that writes no files. Yield it, and the checkpoint to evaluate if its weights are not loaded.

    Args:
        args: with ``weights``, or the ``run`` whose weights it gets.
        read: the configuration, if it was read already.
        values: other values for its keys.

    From a checkpoint algorithms get their state too, such as the averages of EMA, so the values are those of the run.
    """
    from hocket_checkpoints.content import without_plugins
    from hocket_cli.config import trainer_from
    from hocket_cli.overrides import source

    read = source(args) if read is None else read  # a run that cannot be read is that, whatever its weights
    of_run = args.weights in ("best", "latest") and not os.path.lexists(args.weights)
    given = args.weights or args.run
    where = given if of_run else weights_of(given)
    of_run = of_run or where == "latest"
    # A resumed run knows its own checkpoints.
    instead: dict[str, Any] = {"resume": "auto"} if of_run else {"resume": None, "checkpoints": None}
    instead |= {**values, "loggers": ()}
    with warnings.catch_warnings(), without_plugins():
        # Another learning rate or seed than the checkpoint's has no effect: nothing is trained.
        warnings.filterwarnings("ignore", "This run is configured differently from the checkpoint's")
        with trainer_from(args, ("checkpoints",) if of_run else (), read=read, **instead) as trainer:
            if of_run and trainer.settings.checkpoints is not None:
                where = _of_run(trainer, where, args.run, str(read.made.get("run")))
            if where != given and trainer.state.strategy.rank == 0:
                print(f"hocket: the weights of {args.run or given} are those of {where}.", file=sys.stderr, flush=True)
            if of_run or _is_checkpoint(where):
                yield trainer, where
            else:
                trainer.load_weights(where)
                yield trainer, None


def _of_run(trainer: Trainer, which: str, run: str | None, identity: str) -> str:
    """Return best or latest in the folder of checkpoints that a run recorded. Raises ConfigError for those of another run."""
    from hocket.loop.agreement import ranks_of

    assert trainer.settings.checkpoints is not None
    listing = trainer.settings.checkpoints.listing
    path: str = ranks_of(trainer.state).first(lambda: listing.path_of(which))
    owner = listing.store.about(path.rpartition("/")[2]).get("run", {}).get("id", identity)
    if run and owner != identity:
        raise ConfigError(
            run,
            f"It recorded that {listing.store.folder} has its checkpoints, but {path} is of another run. Write --weights "
            "with a checkpoint of this one.",
        )
    return path


def weights_of(place: str) -> str:
    """Return the checkpoint or the file of weights that a path or URL names; ``latest`` if the run has checkpoints elsewhere.

    A run has those of its newest checkpoint, else ``weights.safetensors``. Raises ConfigError.
    """
    from hocket.basics import run_files

    found = newest(place) or place
    if _is_checkpoint(found) or not os.path.isfile(os.path.join(found, "config.yaml")):
        return found
    inside, file = (os.path.join(place, name) for name in ("checkpoints", "weights.safetensors"))
    for weights in (newest(inside), file):
        if weights is not None and (_is_checkpoint(weights) or os.path.isfile(weights)):
            return weights
    if run_files.content(Path(place, run_files.MARK)).get("checkpoints"):
        return "latest"
    raise ConfigError(
        place,
        "It has neither checkpoints nor weights.safetensors, which `hocket train` writes at the end of a run. Name the "
        "checkpoint, such as runs/a/checkpoints/latest.",
    )


def newest(place: str) -> str | None:
    """Return the newest checkpoint of a folder or URL of checkpoints, that of ``best`` or ``latest``, else the place itself.

    None if nothing is there. Raises ConfigError if a checkpoint is damaged, so that the newest is not known.
    """
    from hocket.errors import CheckpointError
    from hocket_checkpoints.storage.store import Store
    from hocket_checkpoints.storage.urls import resolved

    place = str(resolved(place)).rstrip("/")
    if not is_url(place) and (not os.path.isdir(place) or _is_checkpoint(place)):
        return place if os.path.lexists(place) else None
    there = Store(place).existing()
    name = next(reversed(there), "")
    try:
        for damaged in (each for each, about in there.items() if about is None):
            Store(place).about(damaged)
    except CheckpointError as error:
        write = f"Name the checkpoint, such as {place}/{name}."
        raise ConfigError(
            place, f"Its checkpoint {damaged} is damaged, so the newest is not known: {error} {write}"
        ) from error
    return f"{place}/{name}" if there else place


def _is_checkpoint(where: str) -> bool:
    from hocket_checkpoints.storage import manifest

    return is_url(where) or os.path.exists(os.path.join(where, manifest.NAME))
