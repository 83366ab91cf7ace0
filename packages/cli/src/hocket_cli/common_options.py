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


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    config = parser.add_argument("config", nargs="?", help="a YAML file")
    changes = parser.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar="key=value",
        help="overrides of its values, such as duration=2ep or optimizer.adamw.lr=0.1",
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


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file, its overrides and the weights."""
    _add_configuration(parser)
    parser.add_argument(
        "--weights",
        required=True,
        help="best or latest of the configuration's checkpoints, the path of a checkpoint, the folder of a run or of its "
        "checkpoints, or a file of weights such as runs/a/weights.safetensors",
    )
