"""NVIDIA and AMD GPUs."""

import torch

from hocket.devices.base import Device

# Dense bf16/fp16 tensor-core peak of one card, from the makers' data sheets.
_PEAK_HALF = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12, "T4": 65e12}


class CUDA(Device):
    """A GPU that torch reaches through ``torch.cuda``."""

    priority = 20

    def available(self) -> bool:
        """Whether torch sees a GPU."""
        return torch.cuda.is_available()

    def torch_device(self, local_rank: int) -> torch.device:
        """One GPU per rank; raises ValueError if the machine has fewer."""
        count = torch.cuda.device_count()
        if not count:
            raise ValueError(
                "torch sees no GPU on this machine. Pass device='cpu', or install a torch built for the GPU."
            )
        if local_rank >= count:
            raise ValueError(
                f"Local rank {local_rank} has no GPU: this machine has {count}. Start at most {count} processes per "
                "machine, or pass device='cpu'."
            )
        return torch.device("cuda", local_rank)

    def memory(self) -> dict[str, float]:
        """The caching allocator's figures of the current GPU, in bytes."""
        if not torch.cuda.is_initialized():
            return {}
        return {
            "allocated": float(torch.cuda.memory_allocated()),
            "peak_allocated": float(torch.cuda.max_memory_allocated()),
            "reserved": float(torch.cuda.memory_reserved()),
            "peak_reserved": float(torch.cuda.max_memory_reserved()),
        }

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense tensor-core peak for 16-bit dtypes of the cards in the table above."""
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        name = torch.cuda.get_device_name()
        return next((peak for card, peak in _PEAK_HALF.items() if card in name), None)
