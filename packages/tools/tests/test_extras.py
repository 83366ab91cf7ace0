"""Plug-ins of hocket-tools whose library is absent name the extra, or what it brings, to install."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.plugins import registry

#: The libraries of the plug-ins that need one, and what brings each.
PLUGINS: dict[str, tuple[str, str, Any]] = {
    "adapters": ("peft", "peft>=", {"peft": {"r": 2, "target_modules": ["0"]}}),
    "channel-pruning": ("torch_pruning", "torch-pruning>=", {"example": torch.ones(1, 32)}),
    "quantization-aware-training": ("torchao", "torchao>=", {}),
}
EXTRAS = {"adapters": "peft", "channel-pruning": "pruning", "quantization-aware-training": "quantization"}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plug_in_without_its_library_says_what_to_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, brings, options = PLUGINS[name]
    for module in [each for each in sys.modules if each.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)  # as if it was not installed
    with pytest.raises(ImportError, match=rf"(?i)type: pip install .*'{brings}"):
        hocket.Trainer(
            model=nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)), loss="cross_entropy",
            optimizer="sgd(lr=0.1)", device="cpu", duration="1ep", algorithms=[{name: options}],
            train_data=[(torch.ones(4, 32), torch.zeros(4, dtype=torch.long))],
        ).fit()  # fmt: skip


@pytest.mark.parametrize("name", EXTRAS)
def test_a_plug_in_without_the_package_names_the_extra(name: str) -> None:
    assert registry.extra_of("algorithms", name) == EXTRAS[name]
