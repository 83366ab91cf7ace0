"""Which device is chosen, and what a device is told; see test_xla.py for training on one that computes later."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.devices.cuda import CUDA
from hocket.devices.xla import XLA
from hocket.plugins import PluginError
from hocket_testkit.imports import import_in_fresh_process
from hocket_testkit.reference import convolutional_network, labelled_images

without_torch_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is there")


@without_torch_xla
def test_xla_that_is_not_installed_says_what_to_type(monkeypatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not XLA().available()
    with pytest.raises(PluginError, match=r"not installed.*pip install 'torch"):
        hocket.Trainer(nn.Linear(1, 1), device="xla")


def test_xla_beside_the_wrong_torch_says_so(monkeypatch, tmp_path) -> None:
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN5torch4lazy')")
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"cannot be imported with torch .*undefined symbol.*torch 2\.9"):
        XLA().torch_device(0)


def test_xla_is_looked_for_without_importing_it(monkeypatch, tmp_path) -> None:
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert not XLA().available(), "nobody asked for it"
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert XLA().available()


def test_xla_runs_one_process() -> None:
    with pytest.raises(ValueError, match="one process"):
        XLA().torch_device(1)


def test_the_module_brings_nothing_along() -> None:
    imported = import_in_fresh_process("hocket.devices.xla", ("hocket",))
    assert not imported.error and not imported.changed and "torch_xla" not in imported.packages


class Counting(hocket.Device):
    """The CPU, with a count of batches."""

    batches = 0

    def available(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def batch_end(self) -> None:
        self.batches += 1


def test_a_device_hears_of_every_batch() -> None:
    device = Counting()
    data = labelled_images()
    with hocket.Trainer(
        model=convolutional_network(), loss=F.cross_entropy, optimizer="sgd(lr=0.1)", train_data=data, device=device,
        duration="2ep", microbatch=3,
    ) as trainer:  # fmt: skip
        trainer.fit()
        assert device.batches == 2 * len(data)
        trainer.evaluate(data)
        assert device.batches == 3 * len(data)


# --- cuda, emulated: what torch says about GPUs is replaced


@pytest.fixture
def gpus(monkeypatch):
    """A function that makes torch see so many GPUs of a name, under the variables of a launcher."""

    def see(count: int, name: str = "NVIDIA H100 80GB HBM3", **variables: str) -> CUDA:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: name)
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
        for variable in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "HOCKET_LAUNCHED",
            "TORCHELASTIC_RUN_ID",
        ):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        return CUDA()

    return see


SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
}
RAY = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "RAY_RAYLET_PID": "7"}


@pytest.mark.parametrize("variables", [SLURM, RAY], ids=["slurm", "ray"])
def test_a_launcher_may_show_each_process_a_gpu_of_its_own(gpus, variables: dict[str, str]) -> None:
    assert gpus(1, **variables).torch_device(1) == torch.device("cuda", 0)
    assert gpus(2, **variables).torch_device(1) == torch.device("cuda", 1)
    assert gpus(2, **variables).torch_device(3) == torch.device("cuda", 1)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "HOCKET_LAUNCHED": "1"},
    ],
    ids=["devices=2", "torchrun", "hocket launch"],
)
def test_processes_that_share_their_gpus_need_one_each(gpus, variables: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="Local rank 1 has no GPU: this machine has 1"):
        gpus(1, **variables).torch_device(1)


@pytest.mark.parametrize(
    "name, bf16, fp16",
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 989e12), ("NVIDIA H100 PCIe", 756e12, 756e12), ("NVIDIA H100 NVL", 835e12, 835e12),
        ("NVIDIA L4", 121e12, 121e12), ("NVIDIA L40", 181e12, 181e12), ("NVIDIA L40S", 362e12, 362e12),
        ("Tesla T4", None, 65e12), ("NVIDIA T400", None, None), ("A100-SXM4-40GB", 312e12, 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None), ("NVIDIA H100 of tomorrow", None, None),
    ],
)  # fmt: skip
def test_peaks_are_of_whole_product_names(gpus, name: str, bf16: float | None, fp16: float | None) -> None:
    device = gpus(1, name)
    assert (device.peak_flops(torch.bfloat16), device.peak_flops(torch.float16)) == (bf16, fp16)
    assert device.peak_flops(torch.float32) is None


def test_asking_for_gpus_leaves_processes_that_can_be_forked(monkeypatch) -> None:
    """`torch.cuda.is_available()` does not: after it no fork can use a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("it starts the driver"))
    CUDA().available()


def test_a_fork_that_cannot_use_gpus_says_why(gpus, monkeypatch) -> None:
    device = gpus(1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="was forked from one that had already initialized the GPU driver"):
        device.torch_device(0)
