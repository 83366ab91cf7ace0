"""Errors for ranks whose peers do not respond."""

from __future__ import annotations

import torch.distributed as dist

#: Substrings that identify gloo's errors, which have no exception class.
_GLOO = ("gloo", "pair closure")


class CollectiveError(RuntimeError):
    """Raised when other ranks do not respond in time, or a connection is lost."""


class Explained:
    """Turn torch's errors about other ranks into `CollectiveError`: a reentrant context around collectives.

    Args:
        name: the strategy's name.
        rank, world_size: those of this process.
        seconds: torch's timeout.
    """

    def __init__(self, name: str, rank: int, world_size: int, seconds: float) -> None:
        self._who = f"strategy='{name}', rank {rank} of {world_size}"
        self._longer = f"strategy={{'{name}': {{'timeout': {2 * seconds:g}}}}}"
        self._seconds = seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(word in text for word in _GLOO):
            return
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise CollectiveError(
                f"{self._who}: waited {self._seconds:g} s for the others in vain. One of them hangs, is much slower, or "
                "skipped a collective, for example because a collective call is inside `if rank == 0`. Check the last output "
                "of each rank and, with py-spy dump --pid, the stack of each rank that still runs; "
                f"TORCH_DISTRIBUTED_DEBUG=DETAIL compares the collectives. To wait longer: {self._longer}."
            ) from error
        raise CollectiveError(
            f"{self._who}: the connection to another rank is gone or was never made. If that rank has raised or was killed, "
            "its last output says why; check it, and dmesg for a process that ran out of memory. If it still runs, "
            "check the network: MASTER_ADDR, a firewall, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
        ) from error
