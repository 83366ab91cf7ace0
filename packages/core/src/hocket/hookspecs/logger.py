"""Loggers: plug-ins that record values."""

from __future__ import annotations

import re

from hocket.errors import WrongValue
from hocket.hookspecs.callback import Callback


class Logger(Callback):
    """Base class of loggers: callbacks with the hooks of :mod:`hocket.hookspecs.loggers`, called after every other plug-in.

    A logger cannot stop a run: its first exception becomes a warning, and lost rows are counted. Nor can it slow a run
    down: if it implements only hooks of :mod:`hocket.hookspecs.loggers` and events between batches, it is called in a
    separate thread, in order, with a copy of the state without the current batch.

    Open files and connections when the first value arrives, not in ``__init__``. Close them in ``close(state)``, and open
    them again if more values arrive. Write into ``state.run_folder``; reading this attribute creates the folder.

    Where each call costs a request, also define ``log_rows(rows)``, with a list of ``(state, metrics)``: rows of metrics that
    wait for the thread then arrive in one call instead of calls of ``log_metrics``.

    Example:
        >>> import hocket
        >>> class PrintLogger(hocket.Logger):
        ...     def log_metrics(self, state, metrics):
        ...         print(state.timestamp.batch, metrics)
    """

    #: Whether to call the logger on all ranks instead of rank 0. It is then called synchronously and may call collectives.
    all_ranks: bool = False
    #: Whether to call the logger synchronously; None: if it has ``all_ranks`` or hooks called while a batch is in progress.
    synchronous: bool | None = None
    #: Seconds that the end of a fit, and of the run, wait for pending rows.
    deadline: float = 10.0
    #: Whether it only displays values. ``fast_dev_run`` and ``overfit``, which write no files, attach only such loggers.
    shows_only: bool = False


def check_filename(logger: str, filename: str, ending: str) -> None:
    """Raise ValueError unless it is a visible file's name, without a folder, with this ending such as ``.csv``."""
    if not re.fullmatch(rf"[^./\\\0][^/\\\0]*{re.escape(ending)}", filename):
        name = re.split(r"[/\\]", filename)[-1].partition(".")[0] or "metrics"
        raise WrongValue(
            f"The logger {logger!r} was given «filename={filename!r}»; it takes the name of a file within the run's folder "
            f"that ends with {ending!r} and does not begin with a dot. Write «filename={name + ending!r}»."
        )
