"""How processes end that have trained with others."""

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import hashlib
    import torch
    import torch.distributed as dist
    {start}
    group = dist.group.WORLD  # as DistributedDataParallel keeps it to the very end
    something = bytes(10_000_000)

    def later(_):
        for _ in range(10):
            hashlib.sha256(something)  # without the interpreter, which it then wants back
        print("done", flush=True)

    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(later)
"""
PLAIN = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
OURS = 'import hocket; runtime = hocket.Runtime(strategy="ddp", device="cpu")'


def ended(start):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).format(start=start)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def needed():
    if "terminate called" not in ended(PLAIN).stderr:
        pytest.skip(
            "this torch and this python end well by themselves: hocket_strategies/gloo_shutdown.py can go with the others"
        )


@pytest.mark.long
@pytest.mark.parametrize("start", [OURS, f"{PLAIN}; {OURS}"], ids=["ours", "of somebody else"])
@pytest.mark.usefixtures("needed")
def test_python_ends_after_the_threads_of_the_last_collective(start):
    """Torch alone aborts where one of them is late (pytorch#190489)."""
    done = ended(start)
    assert done.returncode == 0 and "done" in done.stdout.splitlines(), done.stderr  # gloo may speak there, too
