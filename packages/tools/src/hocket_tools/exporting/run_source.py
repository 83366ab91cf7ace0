"""The run or checkpoint that a command names: its recorded configuration, and its weights."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.basics.run_folder import Run, is_url
from hocket.plugins import PluginError
from hocket_checkpoints.storage import manifest
from hocket_checkpoints.storage.store import Store
from hocket_checkpoints.storage.urls import resolved
from hocket_cli import recorded_config
from hocket_cli.document import ConfigError
from hocket_cli.overrides import check_keys, override
from hocket_cli.recorded_config import NAME, Source
from hocket_cli.weights import trainer_with_weights

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer

#: The arguments of a run that do not matter for its predictions, and their values.
_INSTEAD = {
    "callbacks": (), "device": "cpu", "devices": None, "strategy": "auto", "compile": False, "limit_predict": None,
    "deterministic": False, "duration": None, "schedule": None, "profile": None,
}  # fmt: skip


@dataclass(frozen=True)
class WeightsOfRun:
    """Weights, and the configuration that they were trained with."""

    #: The path of a checkpoint, or of a file of weights.
    weights: str
    configuration: Source
    #: The folder of the run, if it is known.
    folder: Path | None

    @contextmanager
    def trainer(self, args: argparse.Namespace) -> Iterator[tuple[Trainer, str | None]]:
        """Enter a Trainer in one process on the CPU, and yield it with the checkpoint whose weights it does not have yet."""
        args.weights, args.config = self.weights, self.configuration.file
        with trainer_with_weights(args, self.configuration, **_INSTEAD) as (trainer, checkpoint):
            identity = trainer.state.identity
            identity.run = Run(str(self.configuration.made.get("run", identity.run.id)), identity.run.name)
            yield trainer, checkpoint


def find(place: str, changes: Sequence[str] = ()) -> WeightsOfRun:
    """Return what a path names: the folder of a run, a checkpoint, or ``best`` or ``latest`` in a folder of checkpoints.

    The weights of a run are its newest checkpoint, else ``weights.safetensors``. Raises PluginError.
    """
    where = str(resolved(place))
    if not is_url(where) and not os.path.isdir(where):
        what = "a file" if os.path.exists(where) else "not there"
        raise PluginError(
            f"{place} is {what}, and neither the folder of a run nor a checkpoint. Write for instance runs/a, or "
            "runs/a/checkpoints/best."
        )
    weights = _weights(where)
    try:
        recorded_in = where if os.path.isfile(os.path.join(where, NAME)) else weights
        document, origin = recorded_config.read(recorded_in)
    except ConfigError as error:
        raise PluginError(str(error).removeprefix("--from ")) from error
    for change in changes:
        override(document, change)
    check_keys(document)
    file = os.path.join(where, NAME) if recorded_in == where else weights
    return WeightsOfRun(weights, Source(document, file, None, [], list(changes), origin), _folder(where))


def _weights(where: str) -> str:
    if is_url(where) or os.path.exists(os.path.join(where, manifest.NAME)):
        return where
    for folder in (where, os.path.join(where, "checkpoints")):
        if os.path.isdir(folder) and (names := Store(folder).names()):
            return os.path.join(folder, names[-1])
    if os.path.exists(file := os.path.join(where, "weights.safetensors")):
        return file
    raise PluginError(
        f"{where} has neither checkpoints nor weights.safetensors, which `hocket train` writes at the end of a run. Name the "
        "checkpoint, such as runs/a/checkpoints/latest."
    )


def _folder(where: str) -> Path | None:
    """Return the folder of the run: this one, or the one that has this checkpoint in its folder of checkpoints."""
    path = Path(where)
    return (
        None
        if is_url(where)
        else next((each for each in (path, *list(path.parents)[:2]) if (each / NAME).is_file()), None)
    )
