"""Several ranks on this machine, for tests of distributed code: forked, so that they start in a fraction of a second.

Starting a Python process that imports torch takes seconds; a fork of one that has imported it takes milliseconds.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any


class RankError(RuntimeError):
    """A rank raised, died, or did not end in time. ``rank`` is the first one that did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(rank, *args)`` in ``world_size`` processes at once; what each returned, by rank.

    The ranks have joined a gloo process group, which ``strategy="ddp"`` uses as it is, and find the variables RANK,
    LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in their environment. They compute with one thread. They are forks of this
    process: ``function`` and ``args`` may be anything, closures included; what is returned is pickled.

    Args:
        timeout: seconds after which the ranks that still run are killed.

    Raises:
        RankError: a rank raised (the message holds its traceback), died or did not end in time. The others are killed.
        RuntimeError: this process cannot be forked, because the platform does not know how or a GPU is in use.
    """
    _check_forkable()
    _import_before_forking()
    context = multiprocessing.get_context("fork")
    processes, pipes = [], {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                receiving, sending = context.Pipe(duplex=False)
                # They meet in a file and not at a port: ports can be taken, and a store that listens in this process has a
                # thread that may hold a lock (the name resolver's) at the moment of forking, which the fork never gets.
                arguments = (rank, world_size, f"file://{folder}/store", sending, function, args)
                process = context.Process(target=_rank, args=arguments)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from Python 3.12 on
                    process.start()
                sending.close()
                processes.append(process)
                pipes[receiving] = rank
            results = _collect(pipes, world_size, time.monotonic() + timeout, timeout)
            for process in processes:
                process.join(5.0)  # ends its own DataLoader workers, if it is let
            return results
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _check_forkable() -> None:
    import torch

    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError(f"run_ranks forks, which {sys.platform} cannot. Start a script with torchrun instead.")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "run_ranks forks, and a process that has used a GPU cannot be forked. Call it before anything touches "
            "torch.cuda, or start a script with torchrun instead."
        )


def _import_before_forking() -> None:
    """What ranks would otherwise import one by one, each on its own."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401


def _rank(
    rank: int, world_size: int, store: str, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """What a forked process does: never returns into the code of its parent, always reports."""
    import torch
    import torch.distributed as dist

    # First of all: the pool of threads that the parent computes with does not exist here, and waiting for it never ends.
    torch.set_num_threads(1)
    gc.freeze()  # nor do finalizers of what the parent has left to collect find the threads that they would wait for
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # this machine's name need not have an address
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        # Pickled here and not by the pipe, which would pass tensors on as handles of shared memory that ends with us.
        report = (True, pickle.dumps(function(rank, *args)))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still needs it
            dist.destroy_process_group()
    except BaseException:
        report = (False, pickle.dumps(traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(report)
    pipe.close()


def _collect(pipes: dict[Any, int], world_size: int, deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting: dict[Any, int] = dict(pipes)
    while waiting:
        ready: list[Any] = multiprocessing.connection.wait(list(waiting), max(deadline - time.monotonic(), 0.0))
        if not ready:
            late = sorted(waiting.values())
            raise RankError(
                late[0],
                f"Ranks {late} of {world_size} did not end within {timeout:g} s and were killed. A collective that not "
                "every rank calls waits forever; otherwise allow more with timeout=.",
            )
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                succeeded, content = pipe.recv()
            except EOFError:
                raise RankError(
                    rank, f"Rank {rank} of {world_size} died without a word (killed, or out of memory)."
                ) from None
            if not succeeded:
                raise RankError(rank, f"Rank {rank} of {world_size} raised:\n{pickle.loads(content)}")
            results[rank] = pickle.loads(content)
    return [results[rank] for rank in range(world_size)]
