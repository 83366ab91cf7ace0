"""Meet the other ranks where the launcher's variables say, and join a process group with them."""

from __future__ import annotations

import itertools
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from hocket.basics import launch_environment
from hocket.basics.launch_environment import Environment
from hocket.errors import WrongState, WrongValue
from hocket_strategies.collective_errors import CollectiveError, Explained
from hocket_strategies.launching import loopback, parent, processes

_groups = itertools.count()


def environment(name: str) -> Environment:
    """Return the launcher's variables; for a single process with an address on this machine."""
    if not dist.is_available():
        raise WrongState(
            f"This build of torch has no torch.distributed, which «strategy='{name}'» needs. Use «strategy='single'»."
        )
    found = launch_environment.current()
    if found is None:
        raise WrongState(
            f"«strategy='{name}'» found no other ranks: no launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
            f"nor the variables of SLURM or an MPI, and no process group is initialised. "
            f"{launch_environment.hint(os.environ)}Pass "
            "«devices=2» to the Trainer, start the script once per GPU (or CPU rank), as in hocket launch -n 2 script.py or "
            "torchrun --nproc-per-node 2 script.py, or train in this process with «strategy='single'»."
        )
    if found.world_size == 1:
        return replace(found, master_address=found.master_address or "127.0.0.1", master_port=found.master_port or 0)
    if found.master_address is None or found.master_port is None:
        raise WrongState(
            f"«strategy='{name}'», rank {found.rank} of {found.world_size}: the launcher ({found.launcher}) does not say where "
            "rank 0 is. Set MASTER_ADDR to its machine and MASTER_PORT to a free port there, the same for all ranks; with "
            "MPI: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 (Open MPI) or mpiexec -genv MASTER_ADDR node1 …"
        )
    return found


def join(name: str, backend: str, found: Environment, on: torch.device, seconds: float) -> None:
    timeout = timedelta(seconds=seconds)
    if found.launcher == "torchrun":  # a killed agent would leave its ranks training
        parent.end_with(os.getppid(), lasts=False)
    assert found.master_address is not None and found.master_port is not None
    # Each restart and each group gets its own prefix: ranks that found the addresses of an earlier one would wait for processes
    # that are gone. (torch leaves this to its agent, whose store outlives the workers.) A store that rank 0 opens is new with
    # every restart, and machines that joined at different times have counted different numbers of restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _of_the_agent() else "0"
    with Explained(name, found.rank, found.world_size, seconds):
        meeting = _store(found.master_address, found.master_port, found.rank, found.world_size, timeout)
        store = dist.PrefixStore(f"hocket/{attempt}/{next(_groups)}", meeting)
        _wait_for_all(name, store, found, seconds, _gpu(on) if "nccl" in backend else "")
        dist.init_process_group(
            backend,
            store=store,
            rank=found.rank,
            world_size=found.world_size,
            timeout=timeout,
            device_id=on if on.type == "cuda" else None,
        )


def _gpu(on: torch.device) -> str:
    """Return an identifier of a GPU that is unique over all machines."""
    return f"GPU {torch.cuda.get_device_properties(on).uuid} of {socket.gethostname()}"


def _wait_for_all(name: str, store: dist.Store, found: Environment, seconds: float, gpu: str = "") -> None:
    """Return once every rank has joined. Unlike torch's own waiting, stop when a worker fails, and name the missing ranks.

    Raises ValueError if two ranks have the same ``gpu``: NCCL would fail, or wait forever.
    """
    deadline, pause = time.monotonic() + seconds, 0.01
    store.set(f"here/{found.rank}", gpu)
    store.add("here", 1)
    while store.add("here", 0) < found.world_size:
        processes.raise_failure()
        if time.monotonic() > deadline:
            missing = [rank for rank in range(found.world_size) if not store.check([f"here/{rank}"])]
            raise CollectiveError(
                f"«strategy='{name}'», rank {found.rank} of {found.world_size}: ranks {missing} did not come to "
                f"{found.master_address}:{found.master_port} within {seconds:g} s. Check their last output, and whether "
                "they were started with the same WORLD_SIZE; if starting takes longer, write "
                f"«strategy={{'{name}': {{'timeout': {2 * seconds:g}}}}}»."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    if gpu:
        gpus = store.multi_get([f"here/{rank}" for rank in range(found.world_size)])
        if others := [rank for rank, each in enumerate(gpus) if each.decode() == gpu and rank != found.rank]:
            raise WrongValue(
                f"«strategy='{name}'»: rank {found.rank} and rank {others[0]} would both compute on {gpu}. Start one process "
                "per GPU, or have the launcher show each process its own GPU (SLURM: srun --gpus-per-task=1)."
            )


@cache
def _store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the key-value store of the rendezvous: the agent's if it opened one, otherwise rank 0's. It is never closed."""
    serves = rank == 0 and not _of_the_agent()
    if serves and address in (loopback.ADDRESS, "localhost"):
        with suppress(OSError):  # another store of this process serves the port already, and takes one more client
            store = loopback.store(loopback.listen(port))
            store.set_timeout(timeout)
            return store
    return dist.TCPStore(
        address, port, world_size, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )


def _of_the_agent() -> bool:
    """Whether torch's elastic agent has opened the store for its workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
