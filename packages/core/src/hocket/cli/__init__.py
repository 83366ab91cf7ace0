"""The ``hocket`` command: its sub-commands are plug-ins of kind ``commands``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hocket.cli.command import Command
from hocket.cli.source import summary
from hocket.plugins import PluginError, catalog, switches
from hocket.plugins.distributions import AUTOLOAD, UNREADABLE

__all__ = ["Command", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A plug-in error prints one paragraph on stderr and returns 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _protect_torch()
    try:
        return _run(argv)
    except PluginError as error:
        print(f"hocket: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # piped into head
        return 0


def _protect_torch() -> None:
    """Disable torch's search for backends if an entry-point file is unreadable: importing torch would fail otherwise."""
    unreadable = [each for each in catalog.installed().problems if UNREADABLE in each.text]
    if unreadable and "torch" not in sys.modules and os.environ.setdefault(AUTOLOAD, "0") == "0":
        for dist, version, text in unreadable:
            print(f"hocket: {dist} {version}: {text}. Until then, hocket sets {AUTOLOAD}=0 for torch.", file=sys.stderr)


def _run(argv: list[str]) -> int:
    # Arguments after `launch` belong to the script, which may define its own --no-plugins.
    own = argv.index("launch") if "launch" in argv[:2] else len(argv)
    plugins = False if "--no-plugins" in argv[:own] else None
    argv = [argument for argument in argv[:own] if argument != "--no-plugins"] + argv[own:]
    with switches.use(plugins):
        if not argv or argv[0] in ("-h", "--help"):
            print(_help())
            return 0
        if argv[0] == "--version":
            import hocket

            print(hocket.__version__)
            return 0
        name, *rest = argv
        if name.startswith("-"):
            raise PluginError(f"There is no option '{name}'. The options are --no-plugins, --version and --help.")
        command = catalog.get("commands", name)
        parser = argparse.ArgumentParser(prog=f"hocket {name}", description=command.summary, allow_abbrev=False)
        command.add_arguments(parser)
        code: int = command.run(parser.parse_args(rest))
        return code


def _help() -> str:
    """Return the names of the commands with their summaries, read from the sources without importing them."""
    lines = ["usage: hocket [--no-plugins] [--version] COMMAND …", ""]
    entries = {entry.name: entry for entry in catalog.choices("commands")}
    width = max(map(len, entries))
    lines += [f"  {name:<{width}}  {summary(entry)}".rstrip() for name, entry in entries.items()]
    return "\n".join([*lines, "", "Type hocket COMMAND --help for the arguments of a command."])
