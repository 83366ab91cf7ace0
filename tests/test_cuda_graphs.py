"""CUDA graphs (``compile="reduce-overhead"``) overwrite what earlier calls returned; what is kept is copied."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hocket.loop.graphs import may_overwrite


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [("metrics", "by-hand"), pytest.param((), marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_nothing_that_is_kept_is_overwritten(names: tuple[str, ...], tmp_path: Path) -> None:
    """Losses, metrics, logged values, gradients, in an emulation of CUDA graphs."""
    command = [sys.executable, str(Path(__file__).with_name("cuda_graphs.py")), *names]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("is equal") == (len(names) or 14)


def test_only_graphs_are_copied() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for options, device, expected in [
        (None, cuda, False), ({}, cuda, False), ({"mode": "max-autotune-no-cudagraphs"}, cuda, False),
        ({"mode": "reduce-overhead"}, cuda, True), ({"mode": "max-autotune"}, cuda, True),
        ({"options": {"triton.cudagraphs": True}}, cuda, True), ({"backend": "cudagraphs"}, cuda, True),
        ({"backend": "eager"}, cuda, False), ({"mode": "reduce-overhead"}, cpu, False),
    ]:  # fmt: skip
        assert may_overwrite(nn.Linear(2, 2), options, device) is expected, (options, device)
        compiled = nn.Linear(2, 2)
        if options is not None and options.get("backend") != "eager":  # whose name a compiled module does not say
            compiled.compile(**options)
            assert may_overwrite(nn.Sequential(compiled), None, device) is expected
            assert may_overwrite(nn.Sequential(torch.compile(nn.Linear(2, 2), **options)), None, device) is expected
