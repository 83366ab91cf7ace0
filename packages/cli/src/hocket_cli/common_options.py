"""Arguments common to the commands that read a configuration."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TextIO

from hocket_cli.completion import completes, configurations, overrides, paths

#: What RUN is.
RUN = "the folder of a run, such as runs/a, or one of its checkpoints; best, latest and URLs too"


def add_arguments(parser: argparse.ArgumentParser, what: str = "a YAML file") -> None:
    """Add the configuration file, its overrides, and how to print them."""
    _add_configuration(parser, what)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every key with its value, defaults of plug-ins included, and exit; without a file, a commented template",
    )


def _add_configuration(parser: argparse.ArgumentParser, what: str, metavar: str = "key=value", also: str = "") -> None:
    config = parser.add_argument("config", nargs="?", help=what)
    changes = parser.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar=metavar,
        help=f"{also}overrides of its values, such as duration=2ep or optimizer.adamw.lr=0.1",
    )
    completes(config, configurations)
    completes(changes, overrides)
    add_trust(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the permission to import what a run from elsewhere names, and the traceback."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import the modules that a recorded run from outside of the working folder names, which can do anything",
    )
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def add_weights(parser: argparse.ArgumentParser, name: str, also: str) -> None:
    """Add a run or a configuration file, its data and overrides, and the weights, to the parser of the command ``name``.

    ``also``: what may stand among the overrides.
    """
    _add_configuration(parser, f"{RUN}; or a YAML file with --weights", "DATA|key=value", also)
    parser.set_defaults(command_name=name)
    _add_weights(parser)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add a run, overrides of its configuration, and the weights."""
    completes(parser.add_argument("run", metavar="RUN", help=RUN), paths)
    what = "overrides of its configuration"
    completes(parser.add_argument("changes", nargs="*", default=[], metavar="key=value", help=what), overrides)
    _add_weights(parser)
    add_trust(parser)
    parser.set_defaults(config=None)


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        help="best or latest of the configuration's checkpoints, the path of a checkpoint, the folder of a run or of its "
        "checkpoints, or a file of weights such as runs/a/weights.safetensors; default: the newest checkpoint of the run, "
        "or its weights.safetensors",
    )


def run_of(word: str | None) -> str | None:
    """Return the word that names a run; None for the YAML file of a configuration."""
    return None if word is None or (word.endswith((".yaml", ".yml")) and not os.path.isdir(word)) else word


def json_text(found: object) -> str:
    """Return what ``--json`` prints, which any JSON parser reads: numbers that are NaN or infinite are null."""
    return json.dumps(json.loads(json.dumps(found), parse_constant=lambda constant: None), indent=1)


@contextmanager
def json_alone(wanted: bool) -> Iterator[TextIO]:
    """Yield stdout. With ``wanted``, what all others print goes to stderr meanwhile, so that stdout has the JSON alone."""
    out = sys.stdout
    with redirect_stdout(sys.stderr) if wanted else nullcontext():
        yield out
