"""Devices that compute while the host goes on, emulated on the CPU: what the loop may and may not do without looking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket


class Ahead(hocket.Device):
    """The CPU, said to be asynchronous: the guard looks at values only where the loop may wait."""

    def __init__(self, asynchronous: bool = True) -> None:
        self.asynchronous = asynchronous

    def available(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")


class Spoilt(nn.Module):
    """A linear model; where the first input is 9, gradients are NaN though the loss is finite, where it is 8 the loss too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        if inputs[0, 0] == 9:
            return outputs + (outputs * 0).sqrt()  # 0, whose derivative is 0 / 0
        return outputs * float("nan") if inputs[0, 0] == 8 else outputs


def _finite(path: Path) -> bool:
    trainer = hocket.Trainer(model=Spoilt(), loss=nn.functional.mse_loss, device="cpu")
    trainer.load_weights(path)
    return all(bool(value.isfinite().all()) for value in trainer.model_state_dict().values())


@pytest.mark.filterwarnings("ignore:Not finite in")
@pytest.mark.parametrize("mark, weights_only", [(8.0, True), (9.0, False)], ids=["loss", "gradient"])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_weights_that_are_not_finite_are_never_checkpointed(
    tmp_path: Path, policy: Any, asynchronous: bool, mark: float, weights_only: bool
) -> None:
    """`keep=1` would delete the last good ones."""
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(10)]
    data[5][0][0, 0] = mark  # between two checkpoints, within one logging interval
    trainer = hocket.Trainer(
        model=Spoilt(), loss=nn.functional.mse_loss, train_data=data, duration="10ba", nonfinite=policy, log_every="50ba",
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-2), device=Ahead(asynchronous), folder=tmp_path / "runs",
        checkpoints=hocket.Checkpoints(tmp_path / "kept", every="2ba", keep=1, weights_only=weights_only),
    )  # fmt: skip
    if policy == "raise":
        with pytest.raises(FloatingPointError):
            trainer.fit()
    else:
        with pytest.warns(RuntimeWarning, match="no checkpoint is written; the earlier ones stay"):
            trainer.fit()
    names = sorted(path.name for path in (tmp_path / "kept").glob("ep*"))
    assert names == ["ep0-ba4"]
    assert _finite(tmp_path / "kept" / "ep0-ba4")
