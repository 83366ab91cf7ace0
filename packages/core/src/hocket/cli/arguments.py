"""Arguments common to the commands that read a configuration."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file and its overrides."""
    parser.add_argument("config", help="a YAML file")
    parser.add_argument(
        "changes", nargs="*", default=[], metavar="key=value", help="overrides of its values, such as duration=2ep"
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file, its overrides and the weights."""
    add_arguments(parser)
    parser.add_argument(
        "--weights", required=True, help="a checkpoint, or a file such as `hocket train` writes into its run's folder"
    )
