"""Commands of ``hocket``: an entry point of kind ``commands`` names a `Command`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its module is imported for ``--help``, so it should defer heavy imports to ``run``."""

    #: One line for ``hocket --help``.
    summary: str
    #: Adds the command's arguments to its parser.
    add_arguments: Callable[[argparse.ArgumentParser], None]
    #: Runs the command and returns the exit code.
    run: Callable[[argparse.Namespace], int]
