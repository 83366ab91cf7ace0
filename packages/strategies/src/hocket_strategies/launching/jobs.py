"""The ranks of jobs that an MPI or SLURM has started, from their environment variables.

Sources: the manuals of SLURM's ``srun`` ("output environment variables") and of Open MPI's ``mpirun``. MPICH and Intel MPI
document their variables less; those were observed with ``mpiexec``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping

from hocket.basics.launch_environment import PORT, Environment, check, needed, number
from hocket.errors import WrongValue

#: By launcher, the variables that say which rank this is of how many.
_NAMES = {
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "open-mpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "intel-mpi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def of_job(variables: Mapping[str, str]) -> Environment | None:
    """Return this process's place among those of a job; None if it runs outside of one.

    Raises:
        ValueError: the variables contradict each other, are incomplete or are not numbers.
    """
    for read in (_open_mpi, _hydra, _slurm):
        if (found := read(variables)) is not None:
            check(found, variables, *_NAMES[found.launcher])
            return found
    return None


def _open_mpi(variables: Mapping[str, str]) -> Environment | None:
    name = "OMPI_COMM_WORLD_"
    if name + "RANK" not in variables:
        return None
    world, local = needed(variables, name + "SIZE", name + "RANK"), number(variables, name + "LOCAL_SIZE")
    return Environment(
        "open-mpi",
        needed(variables, name + "RANK"),
        world,
        number(variables, name + "LOCAL_RANK"),
        local,
        variables.get("MASTER_ADDR") or _this_machine(world, local),
        _port(variables, variables.get("PMIX_NAMESPACE")),
    )


def _hydra(variables: Mapping[str, str]) -> Environment | None:
    """Read the variables of Hydra, the process manager of MPICH and Intel MPI. SLURM also sets the PMI variables only."""
    if "PMI_RANK" not in variables or "MPI_LOCALRANKID" not in variables:
        return None
    world, local = needed(variables, "PMI_SIZE", "PMI_RANK"), number(variables, "MPI_LOCALNRANKS")
    return Environment(
        "intel-mpi" if any(name.startswith("I_MPI_") for name in variables) else "mpich",
        needed(variables, "PMI_RANK"),
        world,
        number(variables, "MPI_LOCALRANKID"),
        local,
        variables.get("MASTER_ADDR") or _this_machine(world, local),
        _port(variables, variables.get("I_MPI_HYDRA_UUID")),
    )


def _slurm(variables: Mapping[str, str]) -> Environment | None:
    if "SLURM_PROCID" not in variables or not any(name.startswith("SLURM_STEP") for name in variables):
        return None
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    size = next((name for name in sizes if name in variables), "SLURM_NTASKS")
    world, node = needed(variables, size, "SLURM_PROCID"), number(variables, "SLURM_NODEID")
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
    local = None if tasks is None or node is None else _tasks_of(tasks, node)
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((variables[name] for name in names if variables.get(name)), None)
    job = f"{variables.get('SLURM_JOB_ID') or variables.get('SLURM_JOBID')}.{variables.get('SLURM_STEP_ID')}"
    return Environment(
        "slurm",
        needed(variables, "SLURM_PROCID"),
        world,
        number(variables, "SLURM_LOCALID"),
        local,
        variables.get("MASTER_ADDR") or (next(expand_hosts(nodes)) if nodes else _this_machine(world, local)),
        _port(variables, job),
    )


def _port(variables: Mapping[str, str], job: str | None) -> int:
    """Return a port that all ranks of a job, and few other jobs, derive. It is below Linux's ephemeral ports (from 32768)."""
    given = number(variables, "MASTER_PORT")
    return given if given is not None else PORT if job is None else 20000 + zlib.crc32(job.encode()) % 12000


def _this_machine(world: int, local: int | None) -> str | None:
    return "127.0.0.1" if world == local else None


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
    for digits in _numbers(rest[0], hosts):
        for end in _names(rest[1:], hosts):
            yield begin + digits + end


def _numbers(ranges: str, hosts: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise WrongValue(f"'{part}' in the list of hosts '{hosts}' is not a number or a range such as 01-04.")
        for host in range(int(first), int(last) + 1):
            yield f"{host:0{len(first)}d}"


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
