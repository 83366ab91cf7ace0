"""Put a SLURM job back into the queue, when its run has saved."""

from __future__ import annotations

import os
import subprocess

from hocket.help import warn

#: The signals after which a job is requeued: those of a preemption, and of ``sbatch --signal=USR1@120``. Not Control-C.
SIGNALS = ("SIGTERM", "SIGUSR1")


def job_id() -> str | None:
    """Return what ``scontrol requeue`` calls this process's SLURM job; None outside of SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    # The last task of an array has the array's own id as SLURM_JOB_ID, which would requeue all tasks.
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID") or None


def requeue(job: str) -> None:
    """Put a SLURM job back into the queue; warn if that fails."""
    command = ["scontrol", "requeue", job]
    problem = ""
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except subprocess.CalledProcessError as error:
        problem = f"exit code {error.returncode}: {(error.stderr or error.stdout).strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        warn(
            f"The SLURM job was not requeued: {' '.join(command)}: {problem}. The checkpoint is complete; submit the job "
            "again.",
            RuntimeWarning,
        )
