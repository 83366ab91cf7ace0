"""Loggers: plug-ins that write down."""

from __future__ import annotations

from hocket.callback import Callback


class Logger(Callback):
    """A callback that implements hooks of :mod:`hocket.hookspecs.loggers`, and runs after every other plug-in.

    Open files and connections when the first value arrives, not in ``__init__``; close them in ``close(state)`` and be
    ready to open them again. ``state.run_folder`` is the folder to write into; asking for it creates it.
    """

    #: Whether every rank is told, not only rank 0.
    all_ranks: bool = False
