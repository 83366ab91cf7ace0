"""Commands of ``hocket``: an entry point of kind ``commands`` names a `Command`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its module is imported for ``--help``, so it should defer heavy imports to ``run``."""

    #: One line for ``hocket --help``.
    summary: str
    #: Adds the command's arguments to its parser.
    add_arguments: Callable[[argparse.ArgumentParser], None]
    #: Runs the command and returns the exit code.
    run: Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Explain overrides that are written as options."""
        if found := re.fullmatch(r"unrecognized arguments: .*?--([\w.]+=\S*).*", message):
            message += f"; a value of the configuration is changed without dashes: {found[1]}"
        super().error(message)


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    """Return the parser of a command's arguments."""
    parser = _Parser(prog=f"hocket {name}", description=command.summary, allow_abbrev=False)
    command.add_arguments(parser)
    return parser
