"""Worker processes of DataLoaders that live as long as the run wants them to, whoever is told to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

#: What a run is told to end with. It may want to end with a checkpoint, and for that with the batch under way.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def sheltered(loader: Any) -> Iterator[None]:
    """Workers that ``loader`` starts inside end when this process says so, or with it, and not by signals from elsewhere.

    Clusters, torch's elastic agent and Control-C signal all processes of a run at once. A worker that obeyed would take from
    the run the batches that it still needs to come to the end of the one under way. Where the platform does not say who
    sent a signal, everything is as without this.
    """
    if not (isinstance(loader, DataLoader) and loader.num_workers and hasattr(signal, "sigwaitinfo")):
        yield
        return
    initialize = loader.worker_init_fn
    loader.worker_init_fn = _Start(initialize)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # which the workers inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = initialize


class _Start:
    """What a worker does first."""

    def __init__(self, initialize: Callable[[int], None] | None) -> None:
        self._initialize = initialize

    def __call__(self, number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # where workers are not forked from the loader's thread
        threading.Thread(target=_obey_the_parent, args=(os.getppid(),), daemon=True).start()
        if self._initialize is not None:
            self._initialize(number)


def _obey_the_parent(parent: int) -> None:
    while True:
        told = signal.sigwaitinfo(_SIGNALS)
        if told.si_pid == parent and told.si_signo == signal.SIGTERM:
            os._exit(0)  # as torch's own handler does
