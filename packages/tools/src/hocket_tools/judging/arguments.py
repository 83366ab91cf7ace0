"""What ``hocket evaluate RUN DATA`` and ``hocket predict RUN DATA`` name: runs, their weights, and data."""

from __future__ import annotations

import argparse
import copy
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.basics.run_folder import is_url
from hocket.errors import WrongValue
from hocket.help.names import closest
from hocket.plugins import PluginConfigError, PluginError, registry
from hocket_cli.common_options import run_of

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer


@dataclass(slots=True)
class Asked:
    """One run of a command line: its arguments as those of a configuration, and the data that are named for it."""

    name: str
    args: argparse.Namespace
    #: The label of an evaluation set; None for whichever there is.
    label: str | None = None
    #: The data as they were named.
    data: str = ""


def is_run(word: str) -> bool:
    """Whether a word of the command line names a run or a configuration, and not data."""
    return os.path.isdir(word) or is_url(word) or run_of(word) is None or os.path.basename(word) in ("best", "latest")


def asked(args: argparse.Namespace) -> list[Asked]:
    """Return the runs that a command line names, with the data of the word that is neither a run nor an override.

    Raises PluginError for no run, for several words of data, and for a configuration without weights.
    """
    given = ([] if args.config is None else [args.config]) + list(args.changes)
    words = [each for each in given if "=" not in each or is_run(each)]
    changes = [each for each in given if each not in words]
    runs, data = [each for each in words if is_run(each)], [each for each in words if not is_run(each)]
    if not runs and args.config is not None and data[:1] == [args.config]:
        runs, data = data[:1], data[1:]  # what does not exist, or is a file
    if not runs:
        raise PluginConfigError("Name the folder of a run, such as runs/a, or a configuration with --weights.")
    missing = [each for each in data if os.sep in each and ":" not in each]
    if missing and (data[1:] or getattr(args, "compare", False)):
        raise PluginError(f"{missing[0]} does not exist. Give the folder of a run, such as {runs[0]}, or a checkpoint.")
    if data[1:]:
        raise PluginError(
            f"{data[0]} and {data[1]} both name data, and a command takes one set. Write the label of an evaluation set, "
            "such as test, or module:function; an override is key=value."
        )
    return [_of_run(each, args, changes, *data) for each in runs]


def _of_run(word: str, args: argparse.Namespace, changes: list[str], data: str | None = None) -> Asked:
    args = copy.copy(args)
    args.config, args.changes, args.run = word, list(changes), run_of(word)
    if args.run is None and args.weights is None:
        raise PluginError(
            f"{word} is a configuration, and the command needs --weights: best or latest of its checkpoints, a checkpoint, the "
            f"folder of a run, or a file of weights. Or name a run, as in `hocket {args.command_name} runs/a`. Usage: hocket "
            f"{args.command_name} RUN [DATA] [--weights WEIGHTS] [key=value …]."
        )
    return Asked(word, args) if data is None else _with_data(Asked(word, args), data)


def _with_data(found: Asked, data: str) -> Asked:
    """Return a run with its set of this name, or with data of this import path, or of an installed data set."""
    from hocket_cli.document import parse_value
    from hocket_cli.imports import reference
    from hocket_cli.overrides import configuration

    found.data = data
    sets = configuration(found.args).value.get("eval_data")
    labels = sets.value if sets is not None and isinstance(sets.value, dict) and reference(sets) is None else {}
    if data in labels:
        found.label, instead = data, []
    elif reference(parse_value(data, data)) is not None:
        instead = ["data=null", f"eval_data={{data: {data}}}"]
        found.label = "data"
    elif data in registry.names("datasets"):
        instead = ["train_data=null", "eval_data=null", f"data={data}"]
        found.label = "test"
    else:
        found.label, instead = data, []  # perhaps a set of a data module
    found.args.changes += instead
    found.args.words = dict.fromkeys(instead, f"'{data}'")  # errors about them name what was typed
    return found


@contextmanager
def opened(found: Asked, **instead: Any) -> Iterator[tuple[Trainer, str | None]]:
    """Enter the Trainer of a run, which writes nothing, with its weights; yield it and the checkpoint to evaluate, if any."""
    from hocket_cli.weights import trainer_with_weights

    with trainer_with_weights(found.args, **instead) as (trainer, checkpoint):
        trainer._data.make("eval", running=trainer._running)
        yield trainer, checkpoint


def label_of(trainer: Trainer, label: str | None, verb: str, write: str) -> str:
    """Return the label of an evaluation set of the Trainer. Raises WrongValue unless the label names exactly one set.

    Args:
        verb: what the command does with it, for messages.
        write: how it is named on the command line, with ``{}`` for the label.
    """
    sets = trainer.state.eval_sets
    label = next(iter(sets)) if label is None and len(sets) == 1 else label
    if label is not None and label in sets:
        return label
    there, near = ", ".join(sets) or "none", closest(label or "", sets) or next(iter(sets), "")
    example = write.format(shlex.quote(near))
    if label is None and sets:
        raise WrongValue(
            f"«The Trainer¦The configuration» has the evaluation sets {there}. Name the one to {verb}, such as {example}."
        )
    given = "no evaluation set" if label is None else f"no evaluation set '{label}'"
    advice = f"Write {example}." if sets else "Write «eval_data={'test': …}¦`eval_data: {test: module:loader}` in it»."
    raise WrongValue(f"There is {given}; «the Trainer¦the configuration» has {there}. {advice}")
