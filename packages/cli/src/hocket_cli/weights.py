"""What ``--weights`` names: a checkpoint of the configuration's run, another checkpoint, or a file of weights."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hocket.basics.run_folder import is_url

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer
    from hocket_cli.recorded_config import Source


@contextmanager
def trainer_with_weights(
    args: argparse.Namespace, read: Source | None = None, **values: Any
) -> Iterator[tuple[Trainer, str | None]]:
    """Enter a Trainer that writes no files. Yield it, and the checkpoint to evaluate if its weights are not loaded.

    Args:
        read: the configuration, if it was read already.
        values: other values for its keys.

    From a checkpoint algorithms get their state too, such as the averages of EMA, so the values are those of the run.
    """
    from hocket_cli.config import trainer_from

    of_run = args.weights in ("best", "latest") and not os.path.lexists(args.weights)
    # A resumed run knows its own checkpoints.
    instead: dict[str, Any] = {"resume": "auto"} if of_run else {"resume": None, "checkpoints": None}
    instead |= {**values, "loggers": ()}
    with warnings.catch_warnings():
        # Another learning rate or seed than the checkpoint's has no effect: nothing is trained.
        warnings.filterwarnings("ignore", "This run is configured differently from the checkpoint's")
        with trainer_from(args, ("checkpoints",) if of_run else (), read=read, **instead) as trainer:
            where = args.weights if of_run else _in_folder(args.weights)
            if of_run or _is_checkpoint(where):
                yield trainer, where
            else:
                trainer.load_weights(where)
                yield trainer, None


def _in_folder(where: str) -> str:
    """Return the weights in the folder of a run or of checkpoints, and say so in one line; any other path unchanged."""
    from hocket_checkpoints.storage.store import Store
    from hocket_checkpoints.storage.urls import resolved

    where = str(resolved(where))
    if not os.path.isdir(where) or _is_checkpoint(where):
        return where
    names = Store(where).names()
    found = names[-1] if names else "weights.safetensors"
    path = f"{where.rstrip('/')}/{found}"
    if not os.path.exists(path):
        return where
    what = f"a folder of checkpoints, of which {found} is the newest" if names else f"the folder of a run with {found}"
    print(f"hocket: {where} is {what}. It is read; write --weights {shlex.quote(path)} to name it.", file=sys.stderr)
    return path


def _is_checkpoint(where: str) -> bool:
    from hocket_checkpoints.storage import manifest

    return is_url(where) or os.path.exists(os.path.join(where, manifest.NAME))
