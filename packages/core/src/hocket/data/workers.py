"""Protect worker processes of DataLoaders from signals to the process group, so that they end with the run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.utils.data import DataLoader

#: Signals that ask a run to end: SLURM may send SIGUSR1. It completes the current batch first, and may save a checkpoint.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))


@contextmanager
def sheltered(loader: object) -> Iterator[None]:
    """Have workers that ``loader`` starts inside end only by a signal from this process, or with it.

    Clusters, torch's elastic agent and Control-C signal all processes of a run at once. If a worker ended then, the run could
    not complete the current batch. Does nothing on platforms that do not report the sender of a signal.
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
        self.initialize = initialize

    def __call__(self, number: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # spawned workers do not inherit the mask
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        if self.initialize is not None:
            self.initialize(number)


def _end_with_parent(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(_SIGNALS)
        if received.si_pid == parent and received.si_signo == signal.SIGTERM:
            os._exit(0)  # as torch's own handler does
