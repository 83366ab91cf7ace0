"""Ranks as forks of this process: for notebooks, and for tests.

Starting a Python process that imports torch takes seconds; a fork of one that has imported it takes milliseconds, and it has
everything that was defined in a notebook.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from hocket.launching.errors import Failure, WorkerError

#: Seconds between looks at whether the forks still live.
_POLL = 0.2


def launch(function: Callable[..., Any], processes: int, *args: Any, timeout: float | None = None) -> list[Any]:
    """Call ``function(*args)`` in ``processes`` forks of this process that can train together; what each returned, by rank.

    For notebooks and interactive sessions, where ``Trainer(devices=2)`` has no script to run again. A Trainer that the function
    makes is one of that many ranks. Function and arguments may be anything, closures included; what is returned is pickled,
    and models and their weights stay as they were in this process. Ranks compute with one thread each.

    Args:
        timeout: seconds after which ranks that still run are killed; None to wait for ever.

    Raises:
        WorkerError: a rank raised (the message has its traceback), died or did not end in time. The others are killed.
        RuntimeError: this process cannot be forked, because the platform does not know how or a GPU is in use.

    Example:
        >>> import hocket, torch
        >>> def mean_rank():
        ...     runtime = hocket.Runtime(device="cpu")
        ...     return runtime.all_reduce(torch.tensor(float(runtime.rank)), "mean").item()
        >>> hocket.launch(mean_rank, 2)
        [0.5, 0.5]
    """
    who = f"hocket.launch(…, {processes})"
    check_forkable(who)
    _check_driver(who)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(processes)
        port = listening.getsockname()[1]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HOCKET_LAUNCHED": "1"}

        def rank_main(rank: int) -> Any:
            store = None
            if rank == 0:
                from torch.distributed import TCPStore

                # On the socket that is open already, so that nobody else can take the port.
                store = TCPStore(
                    "127.0.0.1",
                    port,
                    processes,
                    True,
                    wait_for_workers=False,
                    multi_tenant=True,
                    master_listen_fd=os.dup(listening.fileno()),
                )
            listening.close()
            try:
                return function(*args)
            finally:
                del store

        return fork(rank_main, processes, variables=variables, timeout=timeout)


def fork(
    function: Callable[[int], Any], processes: int, *, variables: dict[str, str], timeout: float | None = None
) -> list[Any]:
    """Call ``function(rank)`` in each fork; see `launch`. ``variables`` come into the environment of all."""
    _import_before_forking()
    context = multiprocessing.get_context("fork")
    started, pipes = [], {}
    try:
        for rank in range(processes):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, processes, variables, sending, function))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from Python 3.12 on
                process.start()
            sending.close()
            started.append(process)
            pipes[receiving] = rank
        results = _collect(pipes, started, timeout)
        for process in started:
            process.join(5.0)  # ends its own DataLoader workers, if it is let
        return results
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for pipe in pipes:
            pipe.close()


def check_forkable(who: str) -> None:
    """Raise RuntimeError if this process cannot be forked; ``who`` wants to."""
    import torch

    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError(f"{who} forks, which {sys.platform} cannot. Start a script with torchrun instead.")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            f"{who} forks, and a process that has used a GPU cannot be forked. Call it before anything touches "
            "torch.cuda (in a notebook: restart the kernel first), or start a script with hocket launch instead."
        )


def _check_driver(who: str) -> None:
    """Raise RuntimeError if forks could not use the GPUs of this machine, although this process has not used one yet.

    `torch.cuda.is_available()` starts the driver; a fork then finds it broken. Only a fork can tell, so ask one.
    """
    import torch

    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from Python 3.12 on
        child = os.fork()
    if not child:
        os.write(writing, b"1" if torch.cuda._is_in_bad_fork() else b"0")
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        broken = pipe.read() == b"1"
    os.waitpid(child, 0)
    if broken and torch.cuda.device_count():
        raise RuntimeError(
            f"{who} forks, and forks of this process could not use its GPUs: something has asked for them already, such as "
            "torch.cuda.is_available(). Call hocket.launch first (in a notebook: restart the kernel), start a script with "
            "hocket launch instead, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
        )


def _import_before_forking() -> None:
    """What ranks would otherwise import one by one, each on its own."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401


def _rank(rank: int, world_size: int, variables: dict[str, str], pipe: Any, function: Callable[[int], Any]) -> None:
    """What a forked process does: never returns into the code of its parent, always reports."""
    import torch

    # First of all: the pool of threads that the parent computes with does not exist here, and waiting for it never ends.
    torch.set_num_threads(1)
    gc.freeze()  # nor do finalizers of what the parent has left to collect find the threads that they would wait for
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        **variables,
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # this machine's name need not have an address
    try:
        # Pickled here and not by the pipe, which would pass tensors on as handles of shared memory that ends with us.
        report = (True, pickle.dumps(function(rank)))
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
        # The end of a pipe is no sure sign of a rank's: its DataLoader workers hold it too, and outlive it by seconds.
        ended = [p for p, rank in waiting.items() if processes[rank].exitcode is not None and not p.poll()]
        if not ready and not ended and left == 0.0:
            late = sorted(waiting.values())
            raise WorkerError(
                late[0],
                f"Ranks {late} of {world_size} did not end within {timeout:g} s and were killed. A collective that not "
                "every rank calls waits forever; otherwise allow more with timeout=.",
            )
        for pipe in dict.fromkeys([*ready, *ended]):
            rank = waiting.pop(pipe)
            try:
                if pipe in ended:
                    raise EOFError
                succeeded, content = pipe.recv()
            except EOFError:
                processes[rank].join(5.0)
                why = Failure(rank, processes[rank].exitcode or 0)
                raise WorkerError(rank, f"Rank {rank} of {world_size} died without a word. {why}") from None
            if not succeeded:
                raise WorkerError(rank, f"Rank {rank} of {world_size} raised:\n{pickle.loads(content)}")
            results[rank] = pickle.loads(content)
    return [results[rank] for rank in range(world_size)]
