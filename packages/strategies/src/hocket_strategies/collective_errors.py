"""Errors for ranks whose peers do not respond, and for gradients that were not averaged."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist

from hocket.errors import WrongState

#: Substrings that identify gloo's errors, which have no exception class.
_GLOO = ("gloo", "pair closure")


class CollectiveError(WrongState):
    """Raised when other ranks do not respond in time, or a connection is lost."""


class Explained:
    """Turn torch's errors about other ranks into `CollectiveError`: a reentrant context around collectives.

    Args:
        name: the strategy's name.
        rank, world_size: those of this process.
        seconds: torch's timeout.
    """

    def __init__(self, name: str, rank: int, world_size: int, seconds: float) -> None:
        self._who = f"«strategy='{name}'», rank {rank} of {world_size}"
        self._longer = f"«strategy={{'{name}': {{'timeout': {2 * seconds:g}}}}}»"
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


def not_averaged(error: RuntimeError, name: str, parameters: Sequence[str], in_step: bool) -> RuntimeError:
    """Return an explanation of DistributedDataParallel's error that the gradients of a batch were not all averaged.

    Args:
        name: the strategy's name.
        parameters: the names of its parameters, in its order.
        in_step: whether it was a step of a `hocket.Task.train_batch`.
    """
    found = re.search(r"indices which did not receive grad for rank (\d+):([ \d]+)", str(error))
    if found is None:
        return error
    rank, unused = found[1], [parameters[int(index)] for index in found[2].split()]
    more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
    steps = "If another optimizer holds them, name those of this step: step(self.loss_function, batch, 'optimizer'). "
    return WrongState(
        f"«strategy='{name}'», rank {rank}: the loss does not depend on {', '.join(unused[:5])}{more}, for which all ranks "
        f"wait before they average gradients. {steps if in_step else ''}If the parameters that the loss depends on change "
        f"between batches, write «strategy={{'{name}': {{'find_unused_parameters': True}}}}»; if these are never used, freeze "
        "them with requires_grad_(False)."
    )
