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
    """Run one command and return its exit code; a plug-in error is one paragraph on stderr and exit code 2."""
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
    """Beside entry points that cannot be read, torch can only be imported when it does not look for backends."""
    unreadable = [each for each in catalog.installed().problems if UNREADABLE in each.text]
    if unreadable and "torch" not in sys.modules and os.environ.setdefault(AUTOLOAD, "0") == "0":
        for dist, version, text in unreadable:
            print(f"hocket: {dist} {version}: {text}. Without it, {AUTOLOAD}=0 is set for torch.", file=sys.stderr)


def _run(argv: list[str]) -> int:
    # What follows `launch` is the script's, which may have a --no-plugins of its own.
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
            raise PluginError(f"There is no option '{name}'. There are --no-plugins, --version and --help.")
        command = catalog.get("commands", name)
        parser = argparse.ArgumentParser(prog=f"hocket {name}", description=command.summary, allow_abbrev=False)
        command.add_arguments(parser)
        code: int = command.run(parser.parse_args(rest))
        return code


def _help() -> str:
    """The names of the commands, and what each is for as far as its source shows: nothing is imported."""
    lines = ["usage: hocket [--no-plugins] [--version] COMMAND …", ""]
    entries = {entry.name: entry for entry in catalog.choices("commands")}
    width = max(map(len, entries))
    lines += [f"  {name:<{width}}  {summary(entry)}".rstrip() for name, entry in entries.items()]
    return "\n".join([*lines, "", "hocket COMMAND --help says more about one."])
