"""Several ranks on this machine, for tests of distributed code: forked, so that they start in a fraction of a second."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from hocket.basics.launch_environment import WorkerError as RankError
from hocket.help import optional_packages

__all__ = ["RankError", "run_ranks"]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(rank, *args)`` in ``world_size`` concurrent processes; return the results by rank.

    The ranks have joined a gloo process group, which ``strategy="ddp"`` uses as it is, and the variables RANK, LOCAL_RANK,
    WORLD_SIZE and LOCAL_WORLD_SIZE are set. They compute with one thread. They are forks of this process: ``function`` and
    ``args`` may be anything, closures included; results are pickled.

    Args:
        timeout: seconds after which the ranks that still run are killed.

    Raises:
        RankError: a rank raised (the message holds its traceback), died or did not end in time. The others are killed.
        RuntimeError: this process cannot be forked, because the platform has no fork or a GPU is in use.
        ImportError: hocket-strategies, which forks them, is not installed.

    Example:
        >>> import torch
        >>> from hocket_testkit import run_ranks
        >>> def total(rank):
        ...     tensor = torch.tensor(rank + 1)
        ...     torch.distributed.all_reduce(tensor)
        ...     return tensor.item()
        >>> run_ranks(total, 2)
        [3, 3]
    """
    forks = optional_packages.module("hocket_strategies.launching.forks", "run_ranks")
    forks.check_forkable("run_ranks")
    with tempfile.TemporaryDirectory() as folder:

        def rank_main(rank: int) -> Any:
            import torch.distributed as dist

            # Rendezvous in a file instead of a port: nobody else can take it, and no rank must be first.
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
            dist.barrier()  # otherwise one could leave while another is still connecting
            result = function(rank, *args)
            if dist.is_initialized():
                dist.barrier()  # nobody leaves while another still needs it
                dist.destroy_process_group()
            return result

        results: list[Any] = forks.fork(rank_main, world_size, variables={}, timeout=timeout)
        return results
