"""``hocket launch`` hands over to torchrun's elastic agent, in this process."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.launching.errors import Failure, exit_code, first, read_failure
from hocket.launching.processes import threads_per_process

#: Seconds that workers have to end after a signal before they are killed: for a batch and a checkpoint.
SHUTDOWN = 30


@dataclass(frozen=True, slots=True)
class Job:
    """What to start on this machine, and how it meets the others. The defaults are one machine's."""

    #: ``[script, …]`` or ``["-m", module, …]``, with the arguments.
    target: Sequence[str]
    #: Processes on this machine.
    processes: int
    #: The fewest and the most machines.
    nodes: tuple[int, int] = (1, 1)
    #: This machine's number, which makes the meeting a static one; None to let the machines count themselves.
    node_rank: int | None = None
    endpoint: str = ""
    backend: str = ""
    #: The job's name, the same on every machine.
    id: str = ""
    #: What the backend of the meeting is told besides.
    settings: Mapping[str, Any] = field(default_factory=dict)
    local_address: str | None = None
    max_restarts: int = 0
    #: Threads that a worker computes with; None for OMP_NUM_THREADS, or else its share of the processors.
    threads: int | None = None
    #: Where each rank's output is kept, besides being shown; None to keep none.
    log_folder: Path | None = None


def run(job: Job) -> int:
    """Start the workers, wait for them, and return the exit code: that of the rank that failed first, or 0.

    Raises ValueError for what the agent cannot do.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    backend, endpoint = _meeting(job)
    with tempfile.TemporaryDirectory(prefix="hocket-") as scratch, _variables(job):
        folder = scratch if job.log_folder is None else str(job.log_folder)
        config = LaunchConfig(
            min_nodes=job.nodes[0],
            max_nodes=job.nodes[1],
            nproc_per_node=job.processes,
            run_id=job.id or (uuid.uuid4().hex[:8] if job.nodes == (1, 1) else "hocket"),
            rdzv_backend=backend,
            rdzv_endpoint=endpoint,
            rdzv_configs={**job.settings, **({} if job.node_rank is None else {"rank": job.node_rank})},
            local_addr=job.local_address,
            max_restarts=job.max_restarts,
            logs_specs=DefaultLogsSpecs(folder, tee=Std.NONE if job.log_folder is None else Std.ALL),
            log_line_prefix_template="[rank ${rank}] ",
        )
        if hasattr(config, "shutdown_timeout"):  # not in every torch
            config.shutdown_timeout = SHUTDOWN
        try:
            elastic_launch(config, sys.executable)("-u", "-P", "-m", "hocket.launching.worker", *job.target)
        except ChildFailedError as error:
            return _tell([read_failure(rank, each.exitcode, each.error_file) for rank, each in error.failures.items()])
        except SignalException as error:
            print(f"hocket: ended by {error.sigval.name}, and the workers with it.", file=sys.stderr)
            return _agreed(Path(folder)) or 128 + error.sigval.value
    return 0


def _agreed(folder: Path) -> int | None:
    """The exit code that all workers of the newest attempt announced, such as that of a run that has saved; else None."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda attempt: attempt.stat().st_mtime)
    codes = {exit_code(rank / "error.json") for attempt in attempts[-1:] for rank in attempt.iterdir() if rank.is_dir()}
    return codes.pop() if len(codes) == 1 else None


def _meeting(job: Job) -> tuple[str, str]:
    """Backend and endpoint."""
    if job.node_rank is None:
        if job.backend == "static":
            raise ValueError("--rdzv-backend static needs this machine's number, from 0 on: --node-rank 0.")
        if job.nodes[1] > 1 and not job.endpoint:
            raise ValueError(
                "Several machines need to know where to meet. Give all of them the same machine and port, such as "
                "--rdzv-endpoint node1:29400, and the same --rdzv-id."
            )
        return job.backend or "c10d", job.endpoint or "localhost:0"
    if job.backend not in ("", "static"):
        raise ValueError(
            f"--node-rank is for a static meeting; with --rdzv-backend {job.backend} the machines count themselves. Leave "
            "out one of the two."
        )
    if job.nodes[0] != job.nodes[1]:
        raise ValueError(
            f"--node-rank numbers a fixed set of machines, but --nnodes {job.nodes[0]}:{job.nodes[1]} says that they come "
            "and go. Leave out --node-rank."
        )
    if job.node_rank >= job.nodes[1]:
        raise ValueError(f"--node-rank {job.node_rank} of --nnodes {job.nodes[1]}: machines are counted from 0.")
    if not job.endpoint.rpartition(":")[2].isdecimal():
        raise ValueError("--node-rank needs the address and port of machine 0, such as --rdzv-endpoint node1:29400.")
    return "static", job.endpoint


@contextmanager
def _variables(job: Job) -> Iterator[None]:
    """What workers and the agent find in the environment, as long as they run."""
    threads = os.environ.get("OMP_NUM_THREADS", str(threads_per_process(job.processes)))
    variables = {
        "OMP_NUM_THREADS": threads if job.threads is None else str(job.threads),
        # Else the agent keeps one store for all its life, where restarted ranks find the addresses of dead ones, and where
        # a machine that was lost cannot join again.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
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


def _tell(failures: list[Failure]) -> int:
    root = first(failures)
    others = sorted(failure.rank for failure in failures if failure is not root)
    ended = f"\n\nAfter it ended, or were ended: rank {', '.join(map(str, others))}." if others else ""
    sys.stdout.flush()
    print(f"\nhocket: the first to fail: {root}{ended}\n", file=sys.stderr, flush=True)
    return root.shell_code
