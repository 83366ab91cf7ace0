"""The ranks that this process trains with: detect them from the environment, and have them started.

Every launcher sets environment variables; `environment` reads them, those of MPIs and SLURM by
`hocket_strategies.launching.jobs`. Sources: the manuals of torchrun and Ray Train.

* ``HOCKET_LAUNCHED=1`` tells a rank that hocket has started it. Do not set it yourself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hocket.errors import WrongState, WrongValue
from hocket.help import optional_packages

__all__ = ["Environment", "WorkerError", "cause_of", "current", "environment", "hint", "start"]

#: Prefixes of the variables that MPIs and SLURM's job steps set, and the variables that hold the number of processes.
_OF_JOBS = ("OMPI_COMM_WORLD_", "PMI_", "SLURM_STEP")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
#: Rendezvous port if the launcher sets no value common to all ranks; the same default as torch's.
PORT = 29500


@dataclass(frozen=True, slots=True)
class Environment:
    """One of the processes that a launcher started together. Values that the launcher does not set are None."""

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
    env = _by_name(variables)
    if env is not None:
        check(env, variables, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif any(name.startswith(_OF_JOBS) for name in variables):
        try:
            env = optional_packages.module("hocket_strategies.launching.jobs", "A job of several processes").of_job(
                variables
            )
        except optional_packages.NotInstalled:
            if any(variables.get(name, "1") != "1" for name in _SIZES):
                raise
    return env


def hint(variables: Mapping[str, str]) -> str:
    """Return a sentence that explains why a process of a SLURM job runs alone, or empty."""
    in_a_step = any(name.startswith("SLURM_STEP") for name in variables)
    if in_a_step or "SLURM_JOB_ID" not in variables or variables.get("SLURM_NTASKS", "1") == "1":
        return ""
    return (
        f"This SLURM job has {variables['SLURM_NTASKS']} tasks, but its batch script runs once; write srun before the command "
        "to start it once per task. "
    )


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
    env = current()
    if env is not None and (env.world_size > 1 or env.launcher in ("torchrun", "hocket", "ray", "plain")):
        if env.local_world_size not in (None, devices):
            by = "an earlier Trainer" if workers else f"the launcher ({env.launcher})"
            raise WrongValue(
                f"«devices={devices}», but {by} has started {env.local_world_size} on this machine. Omit «devices=», "
                f"or pass «devices={env.local_world_size}»."
            )
        return
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        starting = optional_packages.module("hocket_strategies.launching.processes", f"devices={devices}")
        workers = starting.start(devices)


def cause_of(error: BaseException) -> BaseException:
    """Return the failure of a worker that caused ``error``, or ``error`` itself."""
    return workers.cause_of(error) if workers else error


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
        needed(variables, "RANK", "WORLD_SIZE"),
        needed(variables, "WORLD_SIZE", "RANK"),
        number(variables, "LOCAL_RANK"),
        number(variables, "LOCAL_WORLD_SIZE"),
        variables.get("MASTER_ADDR") or None,
        number(variables, "MASTER_PORT"),
    )


# --- values of variables


def number(variables: Mapping[str, str], name: str) -> int | None:
    """Return the number that a variable holds, or None if it is not set. Raises ValueError for anything else."""
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text, re.ASCII):
        raise WrongValue(f"The environment variable {name}={text!r} should be an integer, 0 or more.")
    return int(text)


def needed(variables: Mapping[str, str], name: str, other: str = "") -> int:
    """Return the number that a variable holds. Raises ValueError if it is not set, beside ``other``, which is."""
    value = number(variables, name)
    if value is None:
        raise WrongValue(
            f"The environment variable {other} is set but {name} is not. Set both, as a launcher does for every process it "
            f"starts, or none: unset {other}."
        )
    return value


def check(env: Environment, variables: Mapping[str, str], *names: str) -> None:
    """Raise ValueError if ranks and sizes contradict each other; ``names`` are the variables that they were read from."""
    among = env.world_size if env.local_world_size is None else env.local_world_size
    if not env.rank < env.world_size:
        wrong = f"rank {env.rank} of {env.world_size}, counted from 0"
    elif not 1 <= among <= env.world_size:
        wrong = f"one of {among} processes on this machine, of {env.world_size} altogether"
    elif env.local_rank is not None and env.local_rank >= among:
        wrong = f"process {env.local_rank} of {among} on this machine, counted from 0"
    elif env.master_port is not None and not 0 < env.master_port < 65536:
        raise WrongValue(f"MASTER_PORT={env.master_port} is not a port; give one from 1 to 65535.")
    else:
        return
    found_in = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
    raise WrongValue(
        f"According to its environment this process is {wrong}: {found_in}. Start all ranks with one launcher, and unset the "
        "variables of any other."
    )
