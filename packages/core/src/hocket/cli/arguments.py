"""Arguments that the commands with a configuration share."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration, and what to change in it."""
    parser.add_argument("config", help="a YAML file")
    parser.add_argument(
        "changes", nargs="*", default=[], metavar="key=value", help="what to change in it, such as duration=2ep"
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """The same, and weights."""
    add_arguments(parser)
    parser.add_argument(
        "--weights", required=True, help="a checkpoint, or a file such as `hocket train` leaves in its run's folder"
    )
