"""The ranks that this process trains with: detect them from the environment, and have them started.

Every launcher sets environment variables; `environment` reads them. Sources: the manuals of torchrun, of SLURM's ``srun``
("output environment variables"), of Open MPI's ``mpirun`` and of Ray Train. MPICH and Intel MPI document their variables less;
those were observed with ``mpiexec``.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from hocket.errors import WrongState, WrongValue
from hocket.help import elsewhere

__all__ = ["Environment", "WorkerError", "cause_of", "current", "environment", "expand_hosts", "hint", "start"]

#: Rendezvous port if the launcher sets no value common to all ranks; the same default as torch's.
PORT = 29500


@dataclass(frozen=True, slots=True)
class Environment:
    """One process among those that were started together. Values that the launcher does not set are None."""

    #: ``"torchrun"``, ``"hocket"``, ``"ray"``, ``"slurm"``, ``"open-mpi"``, ``"mpich"``, ``"intel-mpi"``, or ``"plain"`` for
    #: RANK and WORLD_SIZE from any other launcher.
    launcher: str
    rank: int
    world_size: int
    #: Rank within, and number of, the processes on this machine.
    local_rank: int | None = None
    local_world_size: int | None = None
    #: Address of rank 0, and the TCP port that it opens for the other ranks.
    master_address: str | None = None
    master_port: int | None = None


def environment(variables: Mapping[str, str]) -> Environment | None:
    """Read this process's environment from ``variables``, such as ``os.environ``; return None if it was started alone.

    RANK and WORLD_SIZE take precedence over the variables of an MPI's ``mpirun``, and those over SLURM's variables, because
    one launcher may have started another. MASTER_ADDR and MASTER_PORT are used from any launcher. SLURM's variables are used
    within a job step only: a batch script has the same variables, but runs once.

    Raises:
        ValueError: the variables contradict each other, are incomplete or are not numbers.
    """
    for read in (_by_name, _open_mpi, _hydra, _slurm):
        found = read(variables)
        if found is not None:
            _check(found, variables)
            return found
    return None


def hint(variables: Mapping[str, str]) -> str:
    """Return a sentence that explains why a process of a SLURM job runs alone, or empty."""
    if _alone_in_a_job(variables):
        return (
            f"This SLURM job has {variables['SLURM_NTASKS']} tasks, but its batch script runs once; write srun before the "
            "command to start it once per task. "
        )
    return ""


# --- the ranks that this process starts


class WorkerError(WrongState):
    """A worker process raised or was killed. The message has its traceback, and ``rank`` is its rank."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Workers(Protocol):
    """The other ranks of this machine, after this process has started them."""

    #: This process among its ranks.
    environment: Environment

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the failure of a worker that caused ``error``, or ``error`` itself."""


#: None until `start` has started some.
workers: Workers | None = None


def current() -> Environment | None:
    """Return the environment of this process among its ranks; None if it is alone. Raises ValueError, see `environment`."""
    return workers.environment if workers else environment(os.environ)


def start(devices: int) -> None:
    """Start ranks 1 to ``devices`` - 1, unless a launcher has started ``devices`` processes on this machine.

    Raises:
        RuntimeError: there is no script to run again.
        ValueError: a different number of processes has been started.
        ImportError: hocket-strategies, which starts them, is not installed.
    """
    global workers
    found = current()
    if found is not None and (found.world_size > 1 or found.launcher in ("torchrun", "hocket", "ray", "plain")):
        if found.local_world_size not in (None, devices):
            by = "an earlier Trainer" if workers else f"the launcher ({found.launcher})"
            raise WrongValue(
                f"«devices={devices}», but {by} has started {found.local_world_size} on this machine. Omit «devices=», "
                f"or pass «devices={found.local_world_size}»."
            )
        return
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        starting = elsewhere.module("hocket_strategies.launching.processes", f"devices={devices}")
        workers = starting.start(devices)


def cause_of(error: BaseException) -> BaseException:
    """Return the failure of a worker that caused ``error``, or ``error`` itself."""
    return workers.cause_of(error) if workers else error


# --- one function for each kind of launcher; it returns None if another launcher started the process


def _by_name(variables: Mapping[str, str]) -> Environment | None:
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return None
    launcher = "plain"
    if "HOCKET_LAUNCHED" in variables:
        launcher = "hocket"
    elif "TORCHELASTIC_RUN_ID" in variables:
        launcher = "torchrun"
    elif "RAY_RAYLET_PID" in variables:
        launcher = "ray"
    return Environment(
        launcher,
        _needed(variables, "RANK", "WORLD_SIZE"),
        _needed(variables, "WORLD_SIZE", "RANK"),
        _number(variables, "LOCAL_RANK"),
        _number(variables, "LOCAL_WORLD_SIZE"),
        variables.get("MASTER_ADDR") or None,
        _number(variables, "MASTER_PORT"),
    )


def _open_mpi(variables: Mapping[str, str]) -> Environment | None:
    name = "OMPI_COMM_WORLD_"
    if name + "RANK" not in variables:
        return None
    world, local = _needed(variables, name + "SIZE", name + "RANK"), _number(variables, name + "LOCAL_SIZE")
    return Environment(
        "open-mpi",
        _needed(variables, name + "RANK"),
        world,
        _number(variables, name + "LOCAL_RANK"),
        local,
        variables.get("MASTER_ADDR") or _this_machine(world, local),
        _port(variables, variables.get("PMIX_NAMESPACE")),
    )


def _hydra(variables: Mapping[str, str]) -> Environment | None:
    """Read the variables of Hydra, the process manager of MPICH and Intel MPI. SLURM also sets the PMI variables only."""
    if "PMI_RANK" not in variables or "MPI_LOCALRANKID" not in variables:
        return None
    world, local = _needed(variables, "PMI_SIZE", "PMI_RANK"), _number(variables, "MPI_LOCALNRANKS")
    return Environment(
        "intel-mpi" if any(name.startswith("I_MPI_") for name in variables) else "mpich",
        _needed(variables, "PMI_RANK"),
        world,
        _number(variables, "MPI_LOCALRANKID"),
        local,
        variables.get("MASTER_ADDR") or _this_machine(world, local),
        _port(variables, variables.get("I_MPI_HYDRA_UUID")),
    )


def _slurm(variables: Mapping[str, str]) -> Environment | None:
    if "SLURM_PROCID" not in variables or not any(name.startswith("SLURM_STEP") for name in variables):
        return None
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    size = next((name for name in sizes if name in variables), "SLURM_NTASKS")
    world, node = _needed(variables, size, "SLURM_PROCID"), _number(variables, "SLURM_NODEID")
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
    local = None if tasks is None or node is None else _tasks_of(tasks, node)
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((variables[name] for name in names if variables.get(name)), None)
    job = f"{variables.get('SLURM_JOB_ID') or variables.get('SLURM_JOBID')}.{variables.get('SLURM_STEP_ID')}"
    return Environment(
        "slurm",
        _needed(variables, "SLURM_PROCID"),
        world,
        _number(variables, "SLURM_LOCALID"),
        local,
        variables.get("MASTER_ADDR") or (next(expand_hosts(nodes)) if nodes else _this_machine(world, local)),
        _port(variables, job),
    )


def _alone_in_a_job(variables: Mapping[str, str]) -> bool:
    in_a_step = any(name.startswith("SLURM_STEP") for name in variables)
    return "SLURM_JOB_ID" in variables and not in_a_step and variables.get("SLURM_NTASKS", "1") != "1"


# --- SLURM's short forms


def expand_hosts(hosts: str) -> Iterator[str]:
    """Expand SLURM's short form of host names, in order: ``"gpu[08-10,12],login"`` is gpu08, gpu09, gpu10, gpu12, login.

    Leading zeros are kept. A name may have several brackets, anywhere; the last bracket varies fastest.
    Raises ValueError if a bracket is not closed, a range runs backwards or a name is missing.
    """
    for name in re.split(r",(?![^\[\]]*\])", hosts.strip()):
        texts = re.split(r"\[([^\[\]]*)\]", name)  # text, ranges, text, ranges, …, text
        if not name.strip() or any(set(text) & set("[]") for text in texts):
            raise WrongValue(f"'{hosts}' is not a list of hosts as SLURM writes it, such as 'gpu[01-04,07],login1'.")
        yield from _names([text.strip() for text in texts], hosts)


def _names(texts: list[str], hosts: str) -> Iterator[str]:
    begin, *rest = texts
    if not rest:
        yield begin
        return
    for number in _numbers(rest[0], hosts):
        for end in _names(rest[1:], hosts):
            yield begin + number + end


def _numbers(ranges: str, hosts: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise WrongValue(f"'{part}' in the list of hosts '{hosts}' is not a number or a range such as 01-04.")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _tasks_of(tasks: str, node: int) -> int:
    """Return the number of tasks of a node. ``"2(x3),1"`` stands for three nodes with two tasks and one with one."""
    left = node
    for part in tasks.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:\(x([0-9]+)\))?\s*", part)
        if match is None:
            break
        left -= int(match[2] or 1)
        if left < 0:
            return int(match[1])
    raise WrongValue(
        f"SLURM's tasks per node, '{tasks}', do not include node {node}; a valid value looks like '2(x3),1'."
    )


# --- numbers


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text, re.ASCII):
        raise WrongValue(f"The environment variable {name}={text!r} should be an integer, 0 or more.")
    return int(text)


def _needed(variables: Mapping[str, str], name: str, other: str = "") -> int:
    number = _number(variables, name)
    if number is None:
        raise WrongValue(
            f"The environment variable {other} is set but {name} is not. Set both, as a launcher does for every process it "
            f"starts, or none: unset {other}."
        )
    return number


def _port(variables: Mapping[str, str], job: str | None) -> int:
    """Return a port that all ranks of a job, and few other jobs, derive. It is below Linux's ephemeral ports (from 32768)."""
    given = _number(variables, "MASTER_PORT")
    return given if given is not None else PORT if job is None else 20000 + zlib.crc32(job.encode()) % 12000


def _this_machine(world: int, local: int | None) -> str | None:
    return "127.0.0.1" if world == local else None


_NAMES = {
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "open-mpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "intel-mpi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def _check(found: Environment, variables: Mapping[str, str]) -> None:
    among = found.world_size if found.local_world_size is None else found.local_world_size
    if not found.rank < found.world_size:
        wrong = f"rank {found.rank} of {found.world_size}, counted from 0"
    elif not 1 <= among <= found.world_size:
        wrong = f"one of {among} processes on this machine, of {found.world_size} altogether"
    elif found.local_rank is not None and found.local_rank >= among:
        wrong = f"process {found.local_rank} of {among} on this machine, counted from 0"
    elif found.master_port is not None and not 0 < found.master_port < 65536:
        raise WrongValue(f"MASTER_PORT={found.master_port} is not a port; give one from 1 to 65535.")
    else:
        return
    names = _NAMES.get(found.launcher, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    found_in = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
    raise WrongValue(
        f"According to its environment this process is {wrong}: {found_in}. Start all ranks with one launcher, and unset the "
        "variables of any other."
    )
