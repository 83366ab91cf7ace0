"""Start ranks from a script: this process is rank 0, and the other ranks run the same command line again.

No process is left running: workers end when this process ends for any reason, and it ends when one of them fails.
"""

from __future__ import annotations

import _thread
import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.basics import launch_environment
from hocket.basics.launch_environment import Environment, WorkerError
from hocket_strategies.launching import loopback, parent
from hocket_strategies.launching.errors import ERROR_FILE, Failure, first, read_failure
from hocket_strategies.launching.script import command_again

if TYPE_CHECKING:
    import torch.distributed as dist

#: Seconds for this process to raise the failure of a worker itself; after half of them it is interrupted, then terminated.
GRACE = 10.0


def start(devices: int) -> Workers:
    """Start ranks 1 to ``devices`` - 1 of this script. Raises RuntimeError if there is no script to run again."""
    return Workers(command_again(devices), devices)


def raise_failure() -> None:
    """Raise WorkerError if a worker of this process has failed. Call it in loops that wait for other ranks."""
    if isinstance(launch_environment.workers, Workers) and (error := launch_environment.workers.error()):
        raise error


def threads_per_process(processes: int) -> int:
    """Return the number of processors that this process may use, divided by ``processes``."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // processes)


class Workers:
    """The processes of ranks 1 to ``number`` - 1 on this machine."""

    def __init__(self, command: list[str], number: int) -> None:
        import torch

        #: The rendezvous of all ranks. It is opened here, so that no other process can take the port.
        self.store: dist.Store = loopback.store(loopback.listen())
        self.environment = Environment("hocket", 0, number, 0, number, loopback.ADDRESS, self.store.port)
        os.environ.update(loopback.variables())
        self._pid = os.getpid()
        self._folder = tempfile.TemporaryDirectory(prefix="hocket-")
        self._changed = threading.Condition()
        self._failures: dict[int, Failure] = {}
        self._closing = False
        self._leaving: object = 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        variables = {
            **os.environ,
            **parent.variable(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_process(number))),
        }
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_per_process(number))  # this process is rank 0
        atexit.register(self._close)
        for rank in range(1, number):
            variables |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number),
                "MASTER_ADDR": loopback.ADDRESS, "MASTER_PORT": str(self.store.port), "HOCKET_LAUNCHED": "1",
                ERROR_FILE: self._error_file(rank),
            }  # fmt: skip
            # In a separate process group, so that Ctrl-C reaches only this process, which then terminates the workers.
            self._processes[rank] = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, process_group=0)
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the failure of a worker that caused ``error``, or ``error`` itself."""
        if isinstance(error, WorkerError):
            return error
        if isinstance(error, SystemExit):
            self.leave(error.code)
        return self.error(wait=3.0 if isinstance(error, RuntimeError) else 0.0) or error

    def error(self, wait: float = 0.0) -> WorkerError | None:
        """Return the error to raise if a worker has failed, or fails within ``wait`` seconds; else None."""
        with self._changed:
            self._changed.wait_for(lambda: self._failures, wait)
            if not self._failures:
                return None
            failure = first(list(self._failures.values()))
        return WorkerError(failure.rank, f"{failure}\n\nTherefore the main process, rank 0, ends too.")

    def leave(self, code: object) -> None:
        """Exit all ranks with this code without reporting a worker failure."""
        with self._changed:
            self._leaving = code
            self._failures = {rank: each for rank, each in self._failures.items() if each.exit_code != code}

    def _error_file(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"{rank}.json")

    def _watch(self, rank: int) -> None:
        """Wait until a worker ends; if it failed, make sure that this process ends too."""
        self._processes[rank].wait()
        if self._closing or not self._failed(rank):
            return
        # Code that waits for the worker raises by itself, unless torch is computing or waiting for a GPU.
        for act in (_thread.interrupt_main, self._give_up):
            time.sleep(GRACE / 2)
            if self._closing or not self._failed(rank):
                return
            act()

    def _failed(self, rank: int) -> bool:
        code = self._processes[rank].poll()
        with self._changed:
            if not code or code == self._leaving:
                return False
            self._failures.setdefault(rank, read_failure(rank, code, self._error_file(rank)))
            self._changed.notify_all()
        return True

    def _give_up(self) -> None:
        """Print the worker's failure and terminate this process immediately."""
        self._closing = True
        failure = first(list(self._failures.values()))
        sys.stdout.flush()
        print(f"\nhocket: {failure}", file=sys.stderr, flush=True)
        self._end()
        os._exit(failure.shell_code)

    def _close(self) -> None:
        """At exit, wait for the workers after a normal end, and terminate them otherwise."""
        if os.getpid() != self._pid:
            return  # a fork of this process
        self._closing = True
        try:
            if getattr(sys, "last_value", None) is None and not self._wait():
                self._give_up()
        finally:
            self._end()
            self._folder.cleanup()

    def _wait(self) -> bool:
        """Wait until all workers have ended. Return False if one has failed."""
        next_message = time.monotonic() + 10.0
        while not any([self._failed(rank) for rank in self._processes]):
            running = [rank for rank, process in self._processes.items() if process.poll() is None]
            if not running:
                return True
            if time.monotonic() > next_message:
                next_message = float("inf")
                print(f"hocket: rank 0 is done and waits for ranks {running}.", file=sys.stderr, flush=True)
            time.sleep(0.05)
        return False

    def _end(self) -> None:
        for process in self._processes.values():
            process.terminate()
        until = time.monotonic() + 5.0
        for process in self._processes.values():
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
