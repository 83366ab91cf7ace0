"""The run that a command names: its Trainer, under the name of the run, and its folder."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics.run_files import MARK, content
from hocket.basics.run_folder import Run, is_url
from hocket.errors import WrongValue
from hocket_cli.recorded_config import NAME, Source
from hocket_cli.weights import trainer_with_weights

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer


def source_of_run(args: argparse.Namespace) -> Source:
    """Return the configuration of the run. Raises WrongValue for a second run, and for data."""
    from hocket_cli.overrides import source

    if more := [each for each in args.changes if "=" not in each]:
        raise WrongValue(
            f"The command takes one run, {args.run}, and its overrides, and {more[0]} is no override. Remove it, or write "
            "key=value, such as device=cpu."
        )
    return source(args)


@contextmanager
def trainer_of_run(args: argparse.Namespace, read: Source, **instead: Any) -> Iterator[tuple[Trainer, str | None]]:
    """Enter the Trainer of a run; yield it with the checkpoint whose weights it does not have yet."""
    with trainer_with_weights(args, read, **instead) as (trainer, checkpoint):
        identity = trainer.state.identity
        identity.run = Run(str(read.made.get("run", identity.run.id)), identity.run.name)
        yield trainer, checkpoint


def folder_to_write(args: argparse.Namespace, read: Source, name: str, to: str, part: str = "") -> Path:
    """Return a part of ``--out``, or of a folder in that of the run, which an export ``to`` a format may replace.

    Raises WrongValue if there is no such folder, and for the folder of another run.
    """
    from hocket_tools.exporting.exporter import checked

    return checked(_folder(args, read, name) / part, None if args.overwrite else read.made.get("run"), to)


def _folder(args: argparse.Namespace, read: Source, name: str) -> Path:
    """Return ``--out``, or a folder in that of the run, which RUN is, or has in its folder of checkpoints."""
    if args.out is not None:
        whose = content(Path(args.out, MARK)).get("run")
        if whose not in (None, read.made.get("run")):
            raise WrongValue(f"--out {args.out} is the folder of another run than {args.run}. Give another folder.")
        return Path(args.out)
    place, path = args.run, Path(args.run)
    for each in () if is_url(place) else (path, *list(path.parents)[:2]):
        if (each / NAME).is_file():
            return each / name
    raise WrongValue(f"{place} is not in the folder of a run, so --out has no default. Write --out FOLDER.")
