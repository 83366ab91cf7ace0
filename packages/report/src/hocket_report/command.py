"""``hocket report runs/a [runs/b …]``: write a page about runs."""

from __future__ import annotations

import argparse
import sys

from hocket.hookspecs.command import Command
from hocket.plugins import PluginError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs and the file."""
    parser.add_argument(
        "runs", nargs="+", metavar="run", help="the folder of a run, such as runs/a; several are compared"
    )
    parser.add_argument(
        "--out", "-o", default="report.html", metavar="FILE", help="the file to write; report.html unless given"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from hocket_report.page import compare

    try:
        path = compare(args.runs, args.out, progress=sys.stderr.isatty())
    except (ValueError, OSError, ImportError) as error:
        raise PluginError(str(error)) from error
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


command = Command("Write a page about a run, or a comparison of several", add_arguments, run)
