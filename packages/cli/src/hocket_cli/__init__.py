"""The ``hocket`` command: its sub-commands are plug-ins of kind ``commands``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from hocket.basics.safe_files import printable
from hocket.errors import Mistake
from hocket.plugins import PluginError, registry, switches
from hocket.plugins.entry_points import AUTOLOAD, UNREADABLE
from hocket_cli import completion, plugin_summaries
from hocket_cli.exit_codes import ExitCode
from hocket_cli.parsers import parser_of

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error of the user prints one paragraph on stderr and returns 2.

    Control-C raises KeyboardInterrupt as ever, whose traceback is not printed.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot print "…"
    _protect_torch()
    try:
        return _run(argv)
    except BrokenPipeError:  # piped into head
        return 0
    except KeyboardInterrupt as error:
        if "--traceback" not in argv[: _own(argv)]:
            if not error.args and os.environ.get("RANK", "0") == "0":  # a fit has said it already, with where it ended
                print("hocket: interrupted.", file=sys.stderr)
            _hide(error)
        raise
    except Exception as error:
        if not isinstance(error, Mistake):
            raise
        if "--traceback" in argv[: _own(argv)]:
            traceback.print_exc()
        else:
            notes = [" ".join(each.split()) for each in getattr(error, "__notes__", ())]
            print(printable(" ".join([f"hocket: {error}", *notes])), file=sys.stderr)
        return ExitCode.FAILED if isinstance(error, ArithmeticError) else ExitCode.MISTAKE


def _hide(error: BaseException) -> None:
    """Have the process end with an exception, as other ranks and the shell expect, without its traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            before(kind, value, trace)

    sys.excepthook = hook


def _own(argv: list[str]) -> int:
    """Return the number of arguments before those of a script, which may define options of these names."""
    return argv.index("launch") if "launch" in argv[:2] else len(argv)


def _protect_torch() -> None:
    """Disable torch's search for backends if an entry-point file is unreadable: importing torch would fail otherwise."""
    unreadable = [each for each in registry.installed().problems if UNREADABLE in each.text]
    if unreadable and "torch" not in sys.modules and os.environ.setdefault(AUTOLOAD, "0") == "0":
        for dist, version, text in unreadable:
            print(f"hocket: {dist} {version}: {text}. Until then, hocket sets {AUTOLOAD}=0 for torch.", file=sys.stderr)


def _run(argv: list[str]) -> int:
    own = _own(argv)
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
        if name == "--print-completion":
            return completion.print_script(rest)
        if name == "--complete":
            return completion.print_candidates(*rest)
        if name.startswith("-"):
            raise PluginError(
                f"There is no option '{name}'. The options are --no-plugins, --print-completion, --version and --help."
            )
        if name not in registry.names("commands") and Path(name).suffix in (".yaml", ".yml", ".py"):
            write = f"python {shlex.quote(name)}" if name.endswith(".py") else f"hocket train {shlex.join(argv)}"
            raise PluginError(
                f"'{name}' is a file and not a command. Write {write}; `hocket --help` lists the commands."
            )
        command = registry.get("commands", name)
        args = _parsed(parser_of(name, command), rest)
        try:
            return int(command.run(args))
        except Mistake as error:
            if any(each.name in args for each in error.settings):
                from hocket_cli.yaml_messages import in_yaml

                error.args = (in_yaml(error, options=vars(args)),)
            raise


def _parsed(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments; options may stand between overrides unless there are sub-commands."""
    try:
        return parser.parse_intermixed_args(argv)
    except TypeError:
        return parser.parse_args(argv)


def _help() -> str:
    """Return the names of the commands with their summaries, read from the sources without importing them."""
    lines = ["usage: hocket [--no-plugins] [--version] [--print-completion SHELL] COMMAND …", ""]
    entries = {entry.name: entry for entry in registry.choices("commands")}
    width = max(map(len, entries))
    lines += [f"  {name:<{width}}  {plugin_summaries.summary(entry)}".rstrip() for name, entry in entries.items()]
    return "\n".join([*lines, "", "Type hocket COMMAND --help for the arguments of a command."])
