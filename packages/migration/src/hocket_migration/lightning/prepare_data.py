"""``prepare_data`` before there is a process group: on one rank of each machine, while the others wait."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_CALLS = itertools.count()


def prepare(owners: Sequence[Any]) -> None:
    """Call ``prepare_data`` of each on the first rank of a machine, or on rank 0 if its ``prepare_data_per_node`` is False.

    Ranks that torchrun has started wait for each other. `hocket.Trainer` starts its own ranks later.
    """
    for owner in owners:
        rank = "LOCAL_RANK" if getattr(owner, "prepare_data_per_node", True) else "RANK"
        if int(os.environ.get(rank, 0)) == 0:
            owner.prepare_data()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    elif world > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        place = f"hocket-migration/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_CALLS)}"
        if store.add(f"{place}/ready", 1) == world:
            store.set(f"{place}/all", "1")
        store.wait([f"{place}/all"])
