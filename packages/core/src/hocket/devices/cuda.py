"""NVIDIA and AMD GPUs."""

import os

import torch

from hocket.basics.launch_environment import environment
from hocket.devices.base import Device
from hocket.errors import WrongState, WrongValue

#: Dense float16 peak of one card on tensor cores, by the name that torch gives it, from the makers' data sheets: NVIDIA's for
#: V100 (2018), T4 (2018), A10, A30, A40, A100 (2021), L4, L40, L40S, H100 (2023), GH200, H200, B200 (2024), where figures
#: "with sparsity" are halved, and AMD's for MI300X and MI325X. Boards of one chip differ: match whole names only.
_PEAK_HALF = {
    "Tesla V100-SXM2-16GB": 125e12, "Tesla V100-SXM2-32GB": 125e12, "Tesla V100-SXM3-32GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12, "Tesla V100-PCIE-32GB": 112e12, "Tesla T4": 65e12,
    "NVIDIA A10": 125e12, "NVIDIA A30": 165e12, "NVIDIA A40": 149.7e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L4": 121e12, "NVIDIA L40": 181e12, "NVIDIA L40S": 362e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12, "NVIDIA GH200 480GB": 989e12, "NVIDIA GH200 120GB": 989e12,
    "NVIDIA H20": 148e12, "NVIDIA B200": 2250e12,
    "AMD Instinct MI300X": 1307e12, "AMD Instinct MI325X": 1307e12,
}  # fmt: skip
#: Cards whose tensor cores do not support bfloat16.
_WITHOUT_BF16 = ("Tesla V100", "Tesla T4")
#: Launchers that give every process of a machine the same environment, and so the same visible GPUs.
_SHARING = ("torchrun", "hocket")


class CUDA(Device):
    """A GPU that torch reaches through ``torch.cuda``.

    Example:
        >>> from hocket.devices.cuda import CUDA
        >>> device = "cuda" if CUDA().available() else "cpu"
    """

    priority = 20

    def available(self) -> bool:
        """Whether torch sees a GPU."""
        # torch.cuda.is_available() would initialize the driver, and this process could not be forked any more.
        # device_count() queries NVML first.
        return torch.cuda.device_count() > 0

    def torch_device(self, local_rank: int) -> torch.device:
        """Return one GPU per rank; raises ValueError if the machine has fewer.

        SLURM (``--gpus-per-task=1``), MPI and Ray may make different GPUs visible to each process, so that GPU indices are
        not local ranks; the index then wraps around.
        """
        if torch.cuda._is_in_bad_fork():
            raise WrongState(
                "This process was forked from one that had already initialized the GPU driver (torch.cuda.is_available() is "
                "enough), so it cannot use GPUs. In a notebook restart the kernel and call hocket before torch.cuda; elsewhere "
                "use hocket launch, or pass «device='cpu'»."
            )
        count = torch.cuda.device_count()
        if not count:
            raise WrongValue(
                "torch sees no GPU on this machine. Pass «device='cpu'», or install a torch built for the GPU."
            )
        launched = environment(os.environ)
        if launched is not None and launched.launcher not in _SHARING:
            local_rank %= count
        if local_rank >= count:
            raise WrongValue(
                f"Local rank {local_rank} has no GPU: this machine has {count}. Start at most {count} processes per "
                "machine, or pass «device='cpu'»."
            )
        return torch.device("cuda", local_rank)

    def memory(self) -> dict[str, float]:
        """Return the caching allocator's statistics of the current GPU, in bytes."""
        if not torch.cuda.is_initialized():
            return {}
        return {
            "allocated": float(torch.cuda.memory_allocated()),
            "peak_allocated": float(torch.cuda.max_memory_allocated()),
            "reserved": float(torch.cuda.memory_reserved()),
            "peak_reserved": float(torch.cuda.max_memory_reserved()),
        }

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Return the dense tensor-core peak for 16-bit dtypes of the cards in the table above, by their exact names."""
        name = torch.cuda.get_device_name()
        if dtype not in (torch.bfloat16, torch.float16) or (dtype is torch.bfloat16 and name.startswith(_WITHOUT_BF16)):
            return None
        # Drivers before 470 omit the manufacturer.
        return _PEAK_HALF.get(name, _PEAK_HALF.get(f"NVIDIA {name}"))
