"""``hocket migrate``: read projects of other frameworks, without importing them, and move their imports."""

from __future__ import annotations

import argparse
import json
import os
import sys

from hocket.errors import MissingFile
from hocket.hookspecs.command import Command

_INSPECT = (
    "Exit status: 0 if every use maps or changes, 1 if a use has no counterpart or is not readable, or if a file or cell could "
    "not be read, 2 if no file could be read or an argument is wrong."
)
_CONVERT = (
    "Without --out and --in-place nothing is written. Exit status: 0 if no line is left for you, 1 if lines are left, or if a "
    "file or cell could not be read, 2 if no file could be read or an argument is wrong."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    inspect = actions.add_parser(
        "inspect", help="list what maps to what, what changes, and what has no counterpart", epilog=_INSPECT
    )
    inspect.add_argument("path", help="a Python file, a notebook or a folder; nothing in it is imported or executed")
    inspect.add_argument("--json", action="store_true", help="print the findings as JSON")
    convert = actions.add_parser("convert", help="move the imports to the drop-in namespaces", epilog=_CONVERT)
    convert.add_argument("path", help="a Python file, a notebook or a folder; nothing in it is imported or executed")
    target = convert.add_mutually_exclusive_group()
    target.add_argument(
        "--out", metavar="FOLDER", help="write the converted project to this folder, which must be empty"
    )
    target.add_argument("--in-place", action="store_true", help="change the files themselves")


def run(args: argparse.Namespace) -> int:
    """Carry out an action."""
    from hocket_migration.inspecting import converting, project, report

    if not os.path.exists(args.path):
        raise MissingFile(
            f"{args.path} does not exist. Write hocket migrate {args.action} PATH, with a Python file, a notebook or a folder."
        )
    if args.action == "convert":
        converted = converting.convert(args.path)
        if args.out or args.in_place:
            converted.write(args.out)
        print(report.of_conversion(converted, args.out, args.in_place))
        return report.status(converted.inspection, converted.left)
    found = project.inspect(args.path)
    if args.json:
        json.dump(found.as_json(), sys.stdout, indent=1, ensure_ascii=False)
        print()
    else:
        print(report.of_inspection(found))
    return report.status(found)


command = Command("Run or move a project of Lightning, Composer, transformers or Accelerate", add_arguments, run)
