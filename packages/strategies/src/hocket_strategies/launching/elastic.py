"""Run torchrun's elastic agent in this process, for ``hocket launch``."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongValue
from hocket_strategies.launching import loopback
from hocket_strategies.launching.errors import Failure, exit_code, first, read_failure
from hocket_strategies.launching.parent import variable
from hocket_strategies.launching.processes import threads_per_process

if TYPE_CHECKING:
    from torch.distributed import TCPStore

#: Seconds from a signal until workers are killed, enough to finish a batch and write a checkpoint.
SHUTDOWN = 30


@dataclass(frozen=True, slots=True)
class Job:
    """The processes to start on this machine, and the rendezvous with other machines. The defaults are for one machine."""

    #: ``[script, …]`` or ``["-m", module, …]``, with the arguments.
    target: Sequence[str]
    #: Number of processes on this machine.
    processes: int
    #: Minimum and maximum number of machines.
    nodes: tuple[int, int] = (1, 1)
    #: This machine's number, for a static rendezvous; None if the rendezvous assigns the numbers.
    node_rank: int | None = None
    endpoint: str = ""
    backend: str = ""
    #: The job's name, identical on all machines.
    id: str = ""
    #: Further options of the rendezvous backend.
    settings: Mapping[str, Any] = field(default_factory=dict)
    local_address: str | None = None
    max_restarts: int = 0
    #: Threads per worker; None for OMP_NUM_THREADS, or else the processors divided by the workers.
    threads: int | None = None
    #: Folder to write each rank's output to, in addition to showing it; None to write none.
    log_folder: Path | None = None

    @property
    def alone(self) -> bool:
        """Whether no other machine may join."""
        return self.nodes == (1, 1)


def run(job: Job) -> int:
    """Start the workers, wait for them, and return the exit code of the rank that failed first, or 0.

    Raises ValueError for a job that the agent cannot run.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    backend, endpoint = _rendezvous(job)
    settings = {**job.settings, **({} if job.node_rank is None else {"rank": job.node_rank})}
    address = job.local_address
    if job.alone and backend in ("c10d", "static"):
        port = endpoint.rpartition(":")[2]
        store = _store(int(port) if port.isdecimal() else 0)
        backend, endpoint, address = "c10d", f"{loopback.ADDRESS}:{store.port}", address or loopback.ADDRESS
        settings = {**job.settings, "is_host": 0}
    with tempfile.TemporaryDirectory(prefix="hocket-") as scratch, _variables(job):
        folder = scratch if job.log_folder is None else str(job.log_folder)
        config = LaunchConfig(
            min_nodes=job.nodes[0],
            max_nodes=job.nodes[1],
            nproc_per_node=job.processes,
            run_id=job.id or (uuid.uuid4().hex[:8] if job.nodes == (1, 1) else "hocket"),
            rdzv_backend=backend,
            rdzv_endpoint=endpoint,
            rdzv_configs=settings,
            local_addr=address,
            max_restarts=job.max_restarts,
            logs_specs=DefaultLogsSpecs(folder, tee=Std.NONE if job.log_folder is None else Std.ALL),
            log_line_prefix_template="[rank ${rank}] ",
        )
        if hasattr(config, "shutdown_timeout"):  # not in every torch
            config.shutdown_timeout = SHUTDOWN
        try:
            elastic_launch(config, sys.executable)("-u", "-P", "-m", "hocket_strategies.launching.worker", *job.target)
        except ChildFailedError as error:
            return _report(
                [
                    read_failure(rank, each.exitcode, each.error_file, each.timestamp)
                    for rank, each in error.failures.items()
                ]
            )
        except SignalException as error:
            print(f"hocket: ended by {error.sigval.name}, and the workers with it.", file=sys.stderr)
            return _announced_code(Path(folder)) or 128 + error.sigval.value
    return 0


def _announced_code(folder: Path) -> int | None:
    """Return the exit code that all workers of the latest attempt recorded, such as after saving; else None."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda attempt: attempt.stat().st_mtime)
    codes = {exit_code(rank / "error.json") for attempt in attempts[-1:] for rank in attempt.iterdir() if rank.is_dir()}
    return codes.pop() if len(codes) == 1 else None


def _rendezvous(job: Job) -> tuple[str, str]:
    """Return backend and endpoint of the rendezvous. Raises ValueError for options that do not fit together."""
    if job.node_rank is None:
        if job.backend == "static":
            raise WrongValue("--rdzv-backend static needs this machine's number, counted from 0: --node-rank 0.")
        if job.nodes[1] > 1 and not job.endpoint:
            raise WrongValue(
                "Several machines need a common rendezvous. Give all of them the same host and port, such as "
                "--rdzv-endpoint node1:29400, and the same --rdzv-id."
            )
        return job.backend or "c10d", job.endpoint or "localhost:0"
    if job.backend not in ("", "static"):
        raise WrongValue(
            f"--node-rank is for a static rendezvous; --rdzv-backend {job.backend} assigns the numbers itself. Remove one of "
            "the two."
        )
    if job.nodes[0] != job.nodes[1]:
        raise WrongValue(
            f"--node-rank numbers a fixed set of machines, but --nnodes {job.nodes[0]}:{job.nodes[1]} lets them join and "
            "leave. Remove --node-rank."
        )
    if job.node_rank >= job.nodes[1]:
        raise WrongValue(f"--node-rank {job.node_rank} of --nnodes {job.nodes[1]}: machines are counted from 0.")
    if not job.endpoint.rpartition(":")[2].isdecimal():
        raise WrongValue("--node-rank needs the address and port of machine 0, such as --rdzv-endpoint node1:29400.")
    return "static", job.endpoint


def _store(port: int) -> TCPStore:
    try:
        return loopback.store(loopback.listen(port))
    except OSError as error:
        raise WrongValue(
            f"--rdzv-endpoint names port {port}, which cannot be used here: {error.strerror}. Omit it: on one machine any free "
            "port is taken."
        ) from None


@contextmanager
def _variables(job: Job) -> Iterator[None]:
    """Set the environment variables of the agent and its workers inside the context."""
    threads = os.environ.get("OMP_NUM_THREADS", str(threads_per_process(job.processes)))
    variables = {
        "OMP_NUM_THREADS": threads if job.threads is None else str(job.threads),
        # Otherwise the agent keeps one store for its lifetime: restarted ranks would find the addresses of dead ranks there,
        # and a lost machine could not join again.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **variable(),
        **(loopback.variables() if job.alone else {}),
    }
    before = {name: os.environ.get(name) for name in (*variables, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _report(failures: list[Failure]) -> int:
    root = first(failures)
    others = sorted(failure.rank for failure in failures if failure is not root)
    ended = f"\n\nFailed later, or were terminated: rank {', '.join(map(str, others))}." if others else ""
    sys.stdout.flush()
    print(f"\nhocket: the first failure: {root}{ended}\n", file=sys.stderr, flush=True)
    return root.shell_code
