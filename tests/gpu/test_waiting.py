"""What makes the host wait for the GPU, by torch's own detector, and what must wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.basics.plain_data import decode
from hocket_checkpoints.storage import format


class Strict(hocket.Callback):
    """torch raises for whatever waits in a batch; the first ones may set things up."""

    def __init__(self) -> None:
        self.batches = 0

    def batch_start(self, state: hocket.State) -> None:
        if 3 <= state.timestamp.batch < 8:
            self.batches += 1
            torch.cuda.set_sync_debug_mode("error")

    def eval_batch_start(self, state: hocket.State) -> None:
        self.batches += 1
        torch.cuda.set_sync_debug_mode("error")

    def batch_end(self, state: hocket.State) -> None:
        torch.cuda.set_sync_debug_mode("default")

    eval_batch_end = exception = close = batch_end


class Two(hocket.Strategy):
    """Two ranks with equal data, whose other one is not there."""

    world_size = 2

    def prepare_data(self, loader: Any, train: bool, global_batch: int | None = None) -> Any:
        return loader

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item, item]


def _weighted(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.mse_loss(outputs, targets), 7


@pytest.mark.parametrize(
    "options",
    [
        {}, {"microbatch": 16}, {"clip_gradients": 1.0}, {"precision": "bf16"}, {"algorithms": ["ema"]},
        {"algorithms": ["sam"]}, {"strategy": Two}, {"loss": _weighted, "microbatch": 16},
        {"algorithms": [{"loss-spike-guard": {"every": 2, "warmup": 2, "window": 4}}]},
        {"loss": F.binary_cross_entropy_with_logits, "train_metrics": "accuracy"},
    ],
    ids=["bare", "microbatches", "clipping", "bf16", "ema", "sam", "two ranks", "weighted loss", "spikes", "accuracy"],
)  # fmt: skip
def test_no_batch_waits(cuda: torch.device, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1))
    data = [(torch.randn(64, 64).pin_memory(), torch.randn(64, 1).pin_memory()) for _ in range(10)]
    strict = Strict()
    options = {"loss": F.mse_loss, **options}
    if "train_metrics" in options:
        data = [(x, (y > 0).float().pin_memory()) for x, y in data]
    options["strategy"] = options["strategy"]() if "strategy" in options else "single"
    trainer = hocket.Trainer(
        model=model, train_data=data, duration="1ep", optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
        device="cuda", log_every="100ba", callbacks=[strict], **options,
    )  # fmt: skip
    trainer.fit()
    trainer.evaluate(data)
    assert strict.batches == 15


def test_weights_that_are_not_finite_are_never_checkpointed(device: str, tmp_path: Path) -> None:
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(40)]
    data[21] = (data[21][0] * float("nan"), data[21][1])

    def make(resume: str | None = None) -> hocket.Trainer:
        return hocket.Trainer(
            model=nn.Linear(3, 1), loss=F.mse_loss, train_data=data, duration="40ba", optimizer="sgd(lr=0.01)",
            device=device, checkpoints=hocket.Checkpoints(tmp_path, every="2ba", keep=3), resume=resume,
        )  # fmt: skip

    with pytest.raises(FloatingPointError):
        make().fit()
    resumed = make("auto")
    assert resumed.state.timestamp.batch == 20
    assert all(bool(parameter.isfinite().all()) for parameter in resumed.state.model.parameters())


def test_asynchronous_checkpoints_hold_the_weights_of_their_batch(device: str, tmp_path: Path) -> None:
    """Training goes on while they are written from pinned memory."""
    kept: dict[int, torch.Tensor] = {}

    class Keep(hocket.Callback):
        def batch_checkpoint(self, state: hocket.State) -> None:
            kept[state.timestamp.batch] = state.model[0].weight.detach().clone()

    size = 4096 if device == "cuda" else 64
    model = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))
    data = [(torch.randn(64, size), torch.randn(64, size))] * 6
    hocket.Trainer(
        model=model, loss=F.mse_loss, train_data=data, duration="6ba", device=device, callbacks=[Keep()],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
        checkpoints=hocket.Checkpoints(tmp_path, every="1ba", keep=None, asynchronous=True),
    ).fit()  # fmt: skip
    assert len(kept) == 6
    for batch, weight in kept.items():
        (folder,) = tmp_path.glob(f"ep*-ba{batch}")
        saved = decode(format.read(folder)["model"])
        assert torch.equal(next(value for name, value in saved.items() if name.endswith("0.weight")), weight.cpu())


def test_pinned_batches_arrive_as_they_were(device: str) -> None:
    """Copies are not waited for, and a loader's pinned memory is used again."""
    inputs = torch.arange(64.0)[:, None].expand(64, 4096)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs), batch_size=4, pin_memory=device == "cuda", num_workers=0
    )
    seen: list[torch.Tensor] = []

    class Model(nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            seen.append(batch[0].detach()[:, 0] * 1)
            return super().forward(batch[0])

    class Own(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.network = Model(4096, 1)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.network(batch)

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return outputs.square().mean()

    hocket.Trainer(model=Own(), train_data=loader, duration="1ep", optimizer="sgd(lr=0.0)", device=device).fit()
    assert torch.equal(torch.cat(seen).cpu(), torch.arange(64.0))
