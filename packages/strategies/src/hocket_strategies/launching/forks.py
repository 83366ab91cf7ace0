"""Start ranks as forks of this process, for notebooks and tests.

Starting a Python process that imports torch takes seconds. A fork of a process that has imported it takes milliseconds, and
inherits all definitions of a notebook.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from hocket.basics.launch_environment import WorkerError
from hocket.errors import WrongState, WrongValue
from hocket_strategies.launching import loopback
from hocket_strategies.launching.errors import Failure
from hocket_strategies.launching.parent import end_with

#: Seconds between checks whether the forks are still alive.
_POLL = 0.2

#: Seconds that a killed rank may take to count as ended, after the others have noticed that it is gone.
_NOTICED = 0.3


def launch(function: Callable[..., Any], processes: int, *args: Any, timeout: float | None = None) -> list[Any]:
    """Call ``function(*args)`` in ``processes`` forks of this process that train together, and return the results by rank.

    Use it in notebooks and interactive sessions, where ``Trainer(devices=2)`` has no script to run again. A Trainer made in
    the function is one of that many ranks. Function and arguments may be any objects, including closures. Results are
    pickled; models and their weights in this process do not change. Each rank computes with one thread.

    Args:
        timeout: seconds after which running ranks are killed; None to wait without limit.

    Raises:
        ValueError: ``processes`` is not a whole number above 0.
        WorkerError: a rank raised (the message has its traceback), died or did not end in time. The others are killed.
        RuntimeError: this process cannot be forked, because the platform does not support it or a GPU is in use.

    Example:
        >>> import hocket, torch
        >>> def mean_rank():
        ...     runtime = hocket.Runtime(device="cpu")
        ...     return runtime.all_reduce(torch.tensor(float(runtime.rank)), "mean").item()
        >>> hocket.launch(mean_rank, 2)
        [0.5, 0.5]
    """
    who = f"hocket.launch(…, {processes!r})"
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise WrongValue(f"{who}: give the number of processes, from 1 on, such as hocket.launch(function, 2).")
    check_forkable(who)
    _check_driver(who)
    with loopback.listen() as listening:
        port = listening.getsockname()[1]
        variables = {"MASTER_ADDR": loopback.ADDRESS, "MASTER_PORT": str(port), "HOCKET_LAUNCHED": "1"}

        def rank_main(rank: int) -> Any:
            store = loopback.store(listening.dup()) if rank == 0 else None
            listening.close()
            try:
                return function(*args)
            finally:
                del store

        return fork(rank_main, processes, variables=variables, timeout=timeout)


def fork(
    function: Callable[[int], Any], processes: int, *, variables: dict[str, str], timeout: float | None = None
) -> list[Any]:
    """Call ``function(rank)`` in each fork; see `launch`. ``variables`` are added to the environment of every fork."""
    _import_before_forking()
    context = multiprocessing.get_context("fork")
    started, pipes = [], {}
    try:
        for rank in range(processes):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, processes, os.getpid(), variables, sending, function))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python >= 3.12 warns about forking with threads
                process.start()
            sending.close()
            started.append(process)
            pipes[receiving] = rank
        results = _collect(pipes, started, timeout)
        for process in started:
            process.join(5.0)  # give it time to terminate its DataLoader workers
        return results
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for pipe in pipes:
            pipe.close()


def check_forkable(who: str) -> None:
    """Raise RuntimeError if this process cannot be forked; ``who`` names the caller in the message."""
    import torch

    if "fork" not in multiprocessing.get_all_start_methods():
        raise WrongState(f"{who} forks, which {sys.platform} does not support. Start a script with torchrun instead.")
    if torch.cuda.is_initialized():
        raise WrongState(
            f"{who} forks, and a process that has used a GPU cannot be forked. Call it before any use of torch.cuda (in a "
            "notebook: restart the kernel first), or start a script with hocket launch instead."
        )


def _check_driver(who: str) -> None:
    """Raise RuntimeError if forks could not use the GPUs of this machine, even though this process has not used one yet.

    `torch.cuda.is_available()` initializes the driver, which is then unusable in forks. Only a fork can detect that, so
    check it in one.
    """
    import torch

    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python >= 3.12 warns about forking with threads
        child = os.fork()
    if not child:
        os.write(writing, b"1" if torch.cuda._is_in_bad_fork() else b"0")
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        broken = pipe.read() == b"1"
    os.waitpid(child, 0)
    if broken and torch.cuda.device_count():
        raise WrongState(
            f"{who} forks, and forks of this process could not use its GPUs: the driver is already initialized, for example "
            "by torch.cuda.is_available(). Call hocket.launch first (in a notebook: restart the kernel), start a script with "
            "hocket launch instead, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
        )


def _import_before_forking() -> None:
    """Import modules once that every rank would otherwise import itself."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401


def _rank(
    rank: int, world_size: int, parent: int, variables: dict[str, str], pipe: Any, function: Callable[[int], Any]
) -> None:
    """Run in a forked process: call the function and report its result or error, without returning to the parent's code."""
    import torch

    end_with(parent)
    # This comes first: the parent's thread pool does not exist in a fork, and waiting for it would never end.
    torch.set_num_threads(1)
    gc.freeze()  # likewise, finalizers of the parent's garbage would wait for threads that do not exist here
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        **variables,
    )
    os.environ.update(loopback.variables())
    try:
        from hocket.basics.objects import pack

        # Pickled here and not by the pipe, which would send tensors as handles of shared memory that ends with this process.
        report = (True, pack(function(rank)))
    except BaseException:
        report = (False, pickle.dumps(traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(report)
    pipe.close()


def _collect(pipes: dict[Any, int], processes: list[Any], timeout: float | None) -> list[Any]:
    world_size = len(processes)
    deadline = None if timeout is None else time.monotonic() + timeout
    results: dict[int, Any] = {}
    waiting: dict[Any, int] = dict(pipes)
    while waiting:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready: list[Any] = multiprocessing.connection.wait(list(waiting), _POLL if left is None else min(left, _POLL))
        # A closed pipe does not show reliably that a rank ended: its DataLoader workers hold the pipe too, for some seconds.
        ended = [p for p, rank in waiting.items() if processes[rank].exitcode is not None and not p.poll()]
        if not ready and not ended and left == 0.0:
            late = sorted(waiting.values())
            raise WorkerError(
                late[0],
                f"Ranks {late} of {world_size} did not end within {timeout:g} s and were killed. A collective that some ranks "
                "do not call waits forever; otherwise pass a larger timeout=.",
            )
        for pipe in dict.fromkeys([*ready, *ended]):
            rank = waiting.pop(pipe)
            try:
                if pipe in ended:
                    raise EOFError
                succeeded, content = pipe.recv()
            except EOFError:
                processes[rank].join(5.0)
                raise _died(rank, processes) from None
            if not succeeded:
                # A rank that a signal killed makes the others raise, which may be noticed first: others hold its pipe too, and
                # its connections are closed a moment before it counts as ended.
                multiprocessing.connection.wait([processes[number].sentinel for number in waiting.values()], _NOTICED)
                ended_by = [number for number, each in enumerate(processes) if (each.exitcode or 0) < 0]
                if ended_by:
                    raise _died(ended_by[0], processes)
                raise WorkerError(rank, f"Rank {rank} of {world_size} raised:\n{pickle.loads(content)}")
            from hocket.basics.objects import unpack

            results[rank] = unpack(content, "cpu")
    return [results[rank] for rank in range(world_size)]


def _died(rank: int, processes: list[Any]) -> WorkerError:
    why = Failure(rank, processes[rank].exitcode or 0)
    return WorkerError(rank, f"Rank {rank} of {len(processes)} died without an exception. {why}")
