"""What a command of ``hocket`` is: an entry point of kind ``commands`` that names a `Command`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its module should import nothing heavy before ``run`` is called: it is imported for ``--help``."""

    #: One line for ``hocket --help``.
    summary: str
    #: Adds the command's arguments to its parser.
    add_arguments: Callable[[argparse.ArgumentParser], None]
    #: Runs it and returns the exit code.
    run: Callable[[argparse.Namespace], int]
