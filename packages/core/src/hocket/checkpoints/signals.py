"""Handle SIGTERM and SIGINT (Control-C) during a fit: the run writes a checkpoint at the next opportunity, and ends.

Under SLURM it may put its job back into the queue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hocket.training.interruption import Interruption

#: The exit code of a run that saved and ended because of a signal: EX_TEMPFAIL of sysexits.h, "try again later".
EXIT_CODE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: The signals after which a job is requeued: those of a preemption, and of ``sbatch --signal=USR1@120``. Not Control-C.
_REQUEUES = ("SIGTERM", "SIGUSR1")
#: Seconds within which signals count as one: a cluster signals all processes, and a launcher forwards the signal to its ranks.
_DUPLICATE = 1.0


class Interrupted(SystemExit):
    """A signal ended a run, which has written a checkpoint or, with ``on_error="warn"``, warned why it could not.

    Uncaught, the process exits with `EXIT_CODE`.
    """


class Signals:
    """Record the first signal; another, a second or more later, raises KeyboardInterrupt at once.

    Handlers of the program are called too, after the signal was recorded.

    Args:
        requeues: whether SIGUSR1 is handled too, under SLURM, and a job is to be requeued.
    """

    def __init__(self, requeues: bool = False) -> None:
        self._first: float | None = None
        #: The SLURM job to put back into the queue, or None.
        self.job = job_id() if requeues else None
        #: Whether one of the signals was one after which the job is requeued.
        self.requeue = False
        self._replaced: dict[int, Any] = {}

    @property
    def received(self) -> bool:
        """Whether this process has received a signal."""
        return self._first is not None

    def listen(self) -> None:
        """Replace the signal handlers. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            more: Sequence[int] = () if self.job is None else (signal.SIGUSR1,)
            self._replaced = {number: signal.signal(number, self._receive) for number in (*_SIGNALS, *more)}

    def stop(self) -> None:
        """Restore the signal handlers."""
        replaced, self._replaced = self._replaced, {}
        for number, handler in replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def forget(self) -> None:
        """Clear the signal, as the run ends now."""
        self._first, self.requeue = None, False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > _DUPLICATE:
            self._first = None
            raise KeyboardInterrupt(f"signal {number}, for the second time")
        self._first = self._first or now
        self.requeue |= signal.Signals(number).name in _REQUEUES
        handler = self._replaced.get(number)
        # Python's own handler of Control-C, and the Trainer's, would interrupt before the checkpoint.
        own = handler is signal.default_int_handler or isinstance(getattr(handler, "__self__", None), Interruption)
        if callable(handler) and not own:
            handler(number, frame)


def job_id() -> str | None:
    """Return what ``scontrol requeue`` calls this process's SLURM job; None outside of SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    # The last task of an array has the array's own id as SLURM_JOB_ID, which would requeue all tasks.
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID") or None


def requeue(job: str) -> None:
    """Put a SLURM job back into the queue; warn if that fails."""
    command = ["scontrol", "requeue", job]
    problem = ""
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except subprocess.CalledProcessError as error:
        problem = f"exit code {error.returncode}: {(error.stderr or error.stdout).strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        warnings.warn(
            f"The SLURM job was not requeued: {' '.join(command)}: {problem}. The checkpoint is complete; submit the job "
            "again.",
            RuntimeWarning,
            stacklevel=2,
        )
