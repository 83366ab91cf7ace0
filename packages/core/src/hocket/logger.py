"""Loggers: plug-ins that write down."""

from __future__ import annotations

from hocket.callback import Callback


class Logger(Callback):
    """A callback that implements hooks of :mod:`hocket.hookspecs.loggers`, and runs after every other plug-in.

    A logger cannot stop a run: what it raises becomes one warning, and the rows that it did not write are counted. Nor can it
    slow a run down: if it implements no hooks but those of :mod:`hocket.hookspecs.loggers` and the events between batches, it
    is called in a thread of its own, in order, with a copy of the state without the current batch.

    Open files and connections when the first value arrives, not in ``__init__``; close them in ``close(state)`` and be
    ready to open them again. ``state.run_folder`` is the folder to write into; asking for it creates it.

    Example:
        >>> import hocket
        >>> class PrintLogger(hocket.Logger):
        ...     def log_metrics(self, state, metrics):
        ...         print(state.timestamp.batch, metrics)
    """

    #: Whether to call the logger on every rank, not only on rank 0. It is then called in place, and may call collectives.
    all_ranks: bool = False
    #: Whether to call the logger in place, and wait for it; None: if it has ``all_ranks`` or takes part in batches.
    synchronous: bool | None = None
    #: Seconds that the end of a fit, and of the run, wait for rows that the thread has not written yet.
    deadline: float = 10.0
    #: Whether it only shows values on a screen: such loggers are attached in ``fast_dev_run`` and ``overfit``, which leave
    #: nothing, too.
    shows_only: bool = False
