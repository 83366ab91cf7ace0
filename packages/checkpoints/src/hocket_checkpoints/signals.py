"""Handle SIGTERM and SIGINT (Control-C) during a fit: the run writes a checkpoint at the next opportunity, and exits with 75.

1. `Signals` records the signal, on the rank that received it.
2. `Signals.request_checkpoint`, at the end of the batch, asks all ranks for a checkpoint.
3. `Checkpoints.batch_checkpoint` (`hocket_checkpoints.periodic_saving`) writes it; outside of batches, its ``epoch_checkpoint``
   or ``after_fit`` does, if a signal arrived `anywhere`.
4. `Signals.end` puts a SLURM job back into the queue, if asked to (`hocket_checkpoints.slurm`), and raises `Interrupted`, which
   ends the process.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hocket.basics.control_c import EXIT_CODE, Deferred, Interrupted, Interruption
from hocket.state.requests import Decision
from hocket_checkpoints import slurm

if TYPE_CHECKING:
    from hocket.state.state import State

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals(Interruption):
    """Record the first signal; another, a second or more later, raises KeyboardInterrupt at once.

    Handlers of the program are called too, after the signal was recorded.

    Args:
        requeues: whether SIGUSR1 is handled too, under SLURM, and a job is to be requeued.
    """

    def __init__(self, requeues: bool = False) -> None:
        super().__init__()
        self._requeues = requeues
        #: The SLURM job to put back into the queue, or None.
        self._job = slurm.job_id() if requeues else None
        #: Whether one of the signals was one after which the job is requeued.
        self._requeue = False
        self._replaced: dict[int, Any] = {}

    def listen(self) -> None:
        """Replace the signal handlers. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            more: Sequence[int] = () if self._job is None else (signal.SIGUSR1,)
            self._replaced = {number: signal.signal(number, self.handle) for number in (*_SIGNALS, *more)}

    def stop(self) -> None:
        """Restore the signal handlers."""
        replaced, self._replaced = self._replaced, {}
        for number, handler in replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        super().handle(number, frame)
        self._requeue |= signal.Signals(number).name in slurm.SIGNALS
        handler = self._replaced.get(number)
        # Python's own handler of Control-C, and the Trainer's, would interrupt before the checkpoint.
        own = handler is signal.default_int_handler or isinstance(getattr(handler, "__self__", None), Interruption)
        if callable(handler) and not own:
            handler(number, frame)

    def request_checkpoint(self, state: State) -> None:
        """Request a checkpoint if a signal arrived. Ranks agree on requests next, so all act after this batch."""
        if self.received:
            state.request(Decision.CHECKPOINT)

    def anywhere(self, state: State) -> bool:
        """Whether any rank received a signal. Every rank has to call this."""
        return any(state.bus.all_gather_object(self.received))

    def end(self, state: State) -> NoReturn:
        """End the run, which has saved. Raises Interrupted. Every rank has to call this.

        Raises KeyboardInterrupt instead for Control-C in a notebook or at a Python prompt, which exiting would end, unless
        there are other ranks, which have to end too.
        """
        if self._requeues:
            asked = any(state.bus.all_gather_object(self._requeue))
            if asked and state.strategy.rank == 0 and self._job is not None:
                slurm.requeue(self._job)
        control_c = self.number == signal.SIGINT and state.strategy.world_size == 1 and hasattr(sys, "ps1")
        self.forget()
        self._requeue = False
        raise Deferred("Control-C: a checkpoint was written") if control_c else Interrupted(EXIT_CODE)
