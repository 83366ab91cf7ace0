"""How many operations graphics cards compute at most, by their makers."""

from __future__ import annotations

import torch

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


def of_card(name: str, dtype: torch.dtype) -> float | None:
    """Return the dense tensor-core peak of a card in operations per second; None for another card, or not a 16-bit dtype."""
    if dtype not in (torch.bfloat16, torch.float16) or (dtype is torch.bfloat16 and name.startswith(_WITHOUT_BF16)):
        return None
    # Drivers before 470 omit the manufacturer.
    return _PEAK_HALF.get(name, _PEAK_HALF.get(f"NVIDIA {name}"))
