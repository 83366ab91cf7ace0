"""What a rank says when the others do not answer."""

from __future__ import annotations

import torch.distributed as dist

#: How gloo's errors, which have no class of their own, can be told from others.
_GLOO = ("gloo", "pair closure")


class CollectiveError(RuntimeError):
    """The other ranks did not come in time, or one of them is gone."""


class Explained:
    """A context around collectives: turns torch's errors about other ranks into `CollectiveError`. Can be entered again.

    Args:
        name: of the strategy.
        rank, world_size: of this process.
        seconds: how long torch was told to wait.
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
                "left out a collective, as where something that all should do stands behind an `if rank == 0`. Look at what "
                "each rank said last and, with py-spy dump --pid, at where those that still run are; "
                f"TORCH_DISTRIBUTED_DEBUG=DETAIL compares the collectives. To wait longer: {self._longer}."
            ) from error
        raise CollectiveError(
            f"{self._who}: the connection to another rank is gone or was never made. If that rank has raised or was killed, "
            "its own last words say why; look at its output, and at dmesg for one that ran out of memory. If it still runs, "
            "look at the network: MASTER_ADDR, a firewall, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
        ) from error
