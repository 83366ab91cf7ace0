"""Worker processes of DataLoaders that end with the run, and not by signals to the whole process group."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

#: Signals that ask a run to end. It completes the current batch first, and may save a checkpoint.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def sheltered(loader: Any) -> Iterator[None]:
    """Have workers that ``loader`` starts inside end when this process says so, or with it, and not by other signals.

    Clusters, torch's elastic agent and Control-C signal all processes of a run at once. A worker that obeyed would deprive the
    run of batches that it needs to complete the current one. Where the platform does not say who sent a signal, this does
    nothing.
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
    """The ``worker_init_fn`` of such workers."""

    def __init__(self, initialize: Callable[[int], None] | None) -> None:
        self._initialize = initialize

    def __call__(self, number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # where workers are not forked from the loader's thread
        threading.Thread(target=_obey_the_parent, args=(os.getppid(),), daemon=True).start()
        if self._initialize is not None:
            self._initialize(number)


def _obey_the_parent(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(_SIGNALS)
        if received.si_pid == parent and received.si_signo == signal.SIGTERM:
            os._exit(0)  # as torch's own handler does
