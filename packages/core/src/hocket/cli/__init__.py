"""The ``hocket`` command: its sub-commands are plug-ins of kind ``commands``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hocket.cli.command import Command
from hocket.plugins import PluginError, catalog, switches

__all__ = ["Command", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a plug-in error is one paragraph on stderr and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except PluginError as error:
        print(f"hocket: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # piped into head
        return 0


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
    lines = ["usage: hocket [--no-plugins] [--version] COMMAND …", ""]
    names = catalog.names("commands")
    width = max(map(len, names))
    for name in names:
        try:
            summary = catalog.get("commands", name).summary
        except PluginError as error:
            summary = f"cannot be used: {error}"
        lines.append(f"  {name:<{width}}  {summary}")
    return "\n".join([*lines, "", "hocket COMMAND --help says more about one."])
