"""Processes and GPUs: forks, one GPU for each task, two ranks on one. Each in a process that has not used a GPU yet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TRAIN = """
import torch, hocket
def train():
    trainer = hocket.Trainer(model=torch.nn.Linear(3, 1), loss=torch.nn.functional.mse_loss, duration="1ep", device="cuda",
        train_data=[(torch.randn(4, 3), torch.randn(4, 1))] * 3, optimizer="sgd(lr=0.01)")
    trainer.fit()
    return trainer.state.loss.item()
"""
TWO_RANKS = """
import torch, hocket
from hocket.devices.cuda import CUDA
class First(CUDA):
    def torch_device(self, local_rank): return torch.device("cuda", 0)
generator = torch.Generator().manual_seed(0)
samples = [(torch.randn(16, generator=generator), torch.randn(1, generator=generator)) for _ in range(256)]
def train(strategy):
    if strategy != "single": torch.distributed.init_process_group("gloo")  # NCCL refuses two ranks on one GPU
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    loader = torch.utils.data.DataLoader(samples, batch_size=32)
    hocket.Trainer(model=model, loss=torch.nn.functional.mse_loss, train_data=loader, global_batch=32, duration="2ep",
        microbatch=6, clip_gradients=0.5, optimizer="sgd(lr=0.1)", device=First(), strategy=strategy).fit()
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
two, one = hocket.launch(train, 2, "ddp", timeout=120), hocket.launch(train, 1, "single", timeout=120)[0]
assert torch.equal(*two)
torch.testing.assert_close(two[0], one, rtol=0, atol=1e-5)
"""


def run(program: str, **variables: str) -> str:
    """What a new Python prints; its last line on stderr where it fails."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env={**os.environ, **variables}, capture_output=True, text=True
    )
    return done.stdout if not done.returncode else done.stderr.strip().splitlines()[-1]


@pytest.mark.usefixtures("cuda")
def test_forks_train_after_auto_has_looked_for_a_gpu() -> None:
    """`device="auto"` asks whether there is one, here in the parent."""
    program = TRAIN + "hocket.devices.cuda.CUDA().available(); print(hocket.launch(train, 1, timeout=90))"
    assert run("import hocket.devices.cuda\n" + program).startswith("[")


@pytest.mark.usefixtures("cuda")
def test_forks_after_the_driver_started_are_refused_before_they_are_made() -> None:
    said = run(TRAIN + "torch.cuda.is_available(); hocket.launch(train, 1, timeout=90)")
    assert said.startswith("RuntimeError: hocket.launch") and "CUDA_VISIBLE_DEVICES=" in said


@pytest.mark.usefixtures("cuda")
def test_a_task_of_slurm_computes_on_the_gpu_that_it_sees() -> None:
    slurm = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
    }
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    program = "from hocket.devices.cuda import CUDA; print(CUDA().torch_device(1))"
    assert run(program, CUDA_VISIBLE_DEVICES=seen, **slurm) == "cuda:0\n"


@pytest.mark.usefixtures("cuda")
def test_two_ranks_on_one_gpu_train_as_one_process() -> None:
    assert run(TWO_RANKS) == ""
