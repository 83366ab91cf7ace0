"""Arguments common to the commands that read a configuration."""

from __future__ import annotations

import argparse

from hocket_cli.completion import completes, configurations, overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file, its overrides, and how to print them."""
    _add_configuration(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every key with its value, defaults of plug-ins included, and exit; without a file, a commented template",
    )


def _add_configuration(
    parser: argparse.ArgumentParser, what: str = "a YAML file", metavar: str = "key=value", also: str = ""
) -> None:
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
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the permission to import what a run from elsewhere names."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import the modules that a recorded run from outside of the working folder names, which can do anything",
    )


def add_weights(parser: argparse.ArgumentParser, name: str, also: str) -> None:
    """Add a run or a configuration file, its data and overrides, and the weights, to the parser of the command ``name``.

    ``also``: what may stand among the overrides.
    """
    what = "the folder of a run, such as runs/a, one of its checkpoints, or a YAML file with --weights"
    _add_configuration(parser, what, "DATA|key=value", also)
    parser.set_defaults(command_name=name)
    parser.add_argument(
        "--weights",
        help="best or latest of the configuration's checkpoints, the path of a checkpoint, the folder of a run or of its "
        "checkpoints, or a file of weights such as runs/a/weights.safetensors; default: those at the end of the run",
    )
