"""NVIDIA and AMD GPUs."""

import os

import torch

from hocket.basics.launch_environment import environment
from hocket.devices.base import Device
from hocket.errors import WrongState, WrongValue
from hocket.help import optional_packages

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
        """Return the dense tensor-core peak for 16-bit dtypes of the cards that hocket-insight knows, by their exact names."""
        peak: float | None = optional_packages.ask("peaks.of_card", torch.cuda.get_device_name(), dtype)
        return peak
