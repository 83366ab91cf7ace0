"""``hocket migrate inspect PATH``: say line by line what a project of another framework needs to run under hocket."""

from __future__ import annotations

import argparse

from hocket.cli.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    inspect = actions.add_parser("inspect", help="list what maps to what, what changes, and what has no counterpart")
    inspect.add_argument("path", help="a Python file, a notebook or a folder; nothing in it is imported or executed")


def run(args: argparse.Namespace) -> int:
    """Carry out an action."""
    raise NotImplementedError


command = Command("Run or move a project of Lightning, Composer, transformers or Accelerate", add_arguments, run)
