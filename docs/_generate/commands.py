"""A page for each command, with its arguments, from its parser."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import surface
from api import ours
from markup import code, page, plain, table

import hocket_cli
from hocket_cli.parsers import parser_of


def pages(folder: Path) -> dict[str, str]:
    """Return the pages by name."""
    entries = [entry for entry in ours() if entry.kind == "commands"]
    found, rows = {}, []
    for entry in entries:
        parsers = [*surface.with_actions(parser_of(entry.name, entry.load()))]
        opening = f"Look up here what to type after `hocket {entry.name}`. The command is of `{entry.dist}`."
        described = plain(parsers[0].description or "")
        found[f"commands/{entry.name}"] = page(parsers[0].prog, opening, described, *map(_section, parsers))
        rows.append([f"[`{parsers[0].prog}`]({entry.name}.md)", described])
    opening = "Look up here which command does what, and which options each has."
    usage = hocket_cli._help().splitlines()[0]
    found["commands/index"] = page(
        "Commands",
        opening,
        f"```text\n{usage}\n```",
        table(["command", "what it does"], rows),
    )
    return found


def _section(parser: argparse.ArgumentParser) -> str:
    """Return usage and arguments of a command, or of one of its actions."""
    parser.formatter_class = functools.partial(argparse.HelpFormatter, width=100)
    formatter = parser._get_formatter()
    rows = [
        [
            code(_shown(action)),
            plain(formatter._expand_help(action)) if action.help else "",
            ", ".join(map(code, map(str, action.choices or ()))),
            code("" if action.default in (None, False, argparse.SUPPRESS, []) else str(action.default)),
        ]
        for action in surface.arguments(parser)
    ]
    heading = f"## {parser.prog}" if parser.prog.count(" ") > 1 else ""
    usage = f"```text\n{parser.format_usage().strip()}\n```"
    return "\n\n".join(filter(None, [heading, usage, table(["argument", "meaning", "allowed", "default"], rows)]))


def _shown(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    value = action.metavar or action.dest.upper()
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return value
    return ", ".join(action.option_strings) + (f" {value}" if action.nargs != 0 else "")
