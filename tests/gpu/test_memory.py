"""Memory of a GPU: microbatches that fit, and models that are sharded before they are there as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket


@pytest.fixture
def two_gigabytes(cuda: torch.device) -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(cuda).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Count:
    """A metric that counts samples."""

    samples = 0

    def reset(self) -> None:
        self.samples = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.samples += len(targets)

    def compute(self) -> float:
        return float(self.samples)


class Growing(nn.Linear):
    """Takes four times the memory in its second call after ``calls`` was set to 0."""

    calls = 100

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        copies = 16384 if self.calls == 2 else 4096
        large = (x.unsqueeze(1) + 0 * self.weight.mean()).repeat(1, copies, 1).sin().exp()
        return super().forward(large.mean(1) + x)


@pytest.mark.usefixtures("two_gigabytes")
def test_memory_that_runs_out_makes_smaller_microbatches_and_counts_each_sample_once() -> None:
    model = Growing(256, 1)

    class Grow(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            model.calls = 0 if state.timestamp.batch == 2 else 100

    data = [(torch.randn(512, 256), torch.randn(512, 1)) for _ in range(4)]
    trainer = hocket.Trainer(
        model=model, loss=F.mse_loss, train_data=data, duration="1ep", optimizer="adamw(lr=0.001)", device="cuda",
        microbatch="auto", train_metrics={"n": Count()}, callbacks=[Grow()],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="Out of memory with"):
        trainer.fit()
    assert trainer.state.metrics["train/n"] == 2048
    assert trainer.state.microbatch is not None and trainer.state.microbatch < 512


def test_fsdp_sets_up_unit_by_unit(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 3 GB, on one rank: its shards are all of it, and besides there is one unit, an eighth."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(12)])
    size = sum(parameter.nbytes for parameter in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer = hocket.Trainer(
        model=model, loss=F.mse_loss, device="cuda", strategy={"fsdp": {"wrap": ["Linear"]}}, precision="bf16",
        optimizer="sgd(lr=0.001)",
    )  # fmt: skip
    assert torch.cuda.max_memory_allocated() - before < 1.3 * size
    assert torch.cuda.memory_allocated() - before < 1.1 * size
    trainer.fit([(torch.randn(8, 8192), torch.randn(8, 8192))] * 3, duration="3ba")
    assert trainer.state.loss is not None and trainer.state.loss.isfinite()
    trainer.state.strategy.shutdown()
