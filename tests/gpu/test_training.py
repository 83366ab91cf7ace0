"""Training on a GPU: precisions, resuming, repeating, compiling, and what the numbers are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.basics.dtensors import non_finite
from hocket.optim import optimizers


def learnable(samples: int = 512, width: int = 64, outputs: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Batches of 64 of a function that a small network learns."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, width, generator=generator)
    y = (x @ torch.randn(width, outputs, generator=generator)).relu()
    return list(zip(x.split(64), y.split(64), strict=True))


def network(width: int = 128, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 1))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in module.parameters()])


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-true", "fp64"])
def test_every_precision_learns(device: str, precision: str) -> None:
    data = learnable()
    trainer = hocket.Trainer(
        model=network(), loss=lambda outputs, targets: F.mse_loss(outputs, targets.to(outputs.dtype)), train_data=data,
        eval_data=data, optimizer="adamw(lr=0.01)", duration="5ep", device=device, precision=precision, clip_gradients=1.0,
        seed=1,
    )  # fmt: skip
    before = trainer.evaluate()["eval/loss"]
    trainer.fit()
    assert trainer.evaluate()["eval/loss"] < before / 2


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_learns(cuda: torch.device, recipe: str, compiled: bool) -> None:
    """Batches of 63 rows, which is no multiple of 16."""
    if torch.cuda.get_device_capability(cuda) < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    data = [(x[:63], y[:63]) for x, y in learnable(outputs=16)]
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
    trainer = hocket.Trainer(
        model=model, loss=F.mse_loss, train_data=data, optimizer="adamw(lr=0.003)", duration="20ep", device="cuda",
        precision={"fp8": {"recipe": recipe}}, compile=compiled,
    )  # fmt: skip
    before = trainer.evaluate(data)["eval/loss"]
    trainer.fit()
    assert trainer.evaluate(data)["eval/loss"] < before / 2


def test_tf32_is_on_inside_only(cuda: torch.device) -> None:
    a = torch.randn(2048, 2048)
    exact = (a.double() @ a.double()).to(cuda)
    errors: list[float] = []

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(a.clone())

        def forward(self, x: Tensor) -> Tensor:
            product = x @ self.weight
            errors.append((product.detach().double() - exact).abs().max().item())
            return product

    before = torch.get_float32_matmul_precision()
    for precision in ("fp32", "tf32"):
        hocket.Trainer(
            model=Product(), loss=lambda outputs, targets: outputs.mean(), train_data=[(a, a)], duration="1ba",
            optimizer="sgd(lr=0.0)", device="cuda", precision=precision,
        ).fit()  # fmt: skip
    errors.append((a.to(cuda) @ a.to(cuda)).double().sub(exact).abs().max().item())
    full, low, outside = errors
    assert full < 2e-3 and outside < 2e-3 and 5e-3 <= low < 1.0
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_a_resumed_run_has_the_same_bits(device: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """With dropout on the GPU, whose generator goes on."""
    if options == {"capturable": True} and device == "cpu":
        pytest.skip("for graphs of CUDA")
    data = learnable(768)

    def make(folder: Path, resume: str | None = None) -> hocket.Trainer:
        return hocket.Trainer(
            model=network(dropout=0.5), loss=F.mse_loss, train_data=data, duration="12ba", device=device, seed=3,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2, **options), precision="bf16",
            checkpoints=hocket.Checkpoints(folder, every="5ba"), resume=resume,
        )  # fmt: skip

    whole = make(tmp_path / "a")
    whole.fit()
    make(tmp_path / "b").fit("5ba")
    torch.rand(7, device=device)  # of somebody else
    resumed = make(tmp_path / "b", "auto")
    resumed.fit()
    assert resumed.state.timestamp.batch == 12
    assert torch.equal(flat(whole.state.model), flat(resumed.state.model))


def test_deterministic_runs_repeat_themselves(device: str) -> None:
    def run() -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
        data = [(torch.randn(16, 3, 16, 16), torch.arange(16) % 10) for _ in range(8)]
        hocket.Trainer(
            model=model, loss=F.cross_entropy, train_data=data, optimizer="adamw(lr=0.001)", duration="3ep", device=device,
            deterministic=True, seed=1,
        ).fit()  # fmt: skip
        return flat(model)

    assert torch.equal(run(), run())


class WithLoss(nn.Module):
    """Computes its loss itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.network(x), y)}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("options", [{}, {"microbatch": 16}, {"algorithms": ["sam"]}], ids=str)
def test_compiled_steps_are_those_of_eager_ones(cuda: torch.device, mode: str, options: dict[str, Any]) -> None:
    """``reduce-overhead`` records CUDA graphs, whose outputs the next replay overwrites."""
    data = [{"x": x, "y": y} for x, y in learnable()]

    def run(**more: Any) -> Tensor:
        torch.manual_seed(1)
        trainer = hocket.Trainer(
            model=WithLoss(), train_data=data, eval_data=data, duration="2ep", optimizer="sgd(lr=0.01)", device="cuda",
            log_every="1ba", clip_gradients=1.0, **options, **more,
        )  # fmt: skip
        trainer.fit()
        return flat(trainer.state.model)

    torch.testing.assert_close(run(compile={"mode": mode}), run(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"fused": True}, {"foreach": True}, {"capturable": True}, {"lr": 1e-3, "capturable": True},
        {"lr": 1e-3, "fused": True},
    ],
    ids=str,
)  # fmt: skip
def test_steps_are_those_of_the_optimizer(cuda: torch.device, options: dict[str, Any]) -> None:
    options = {name: torch.tensor(value, device=cuda) if name == "lr" else value for name, value in options.items()}

    def run(step: Any) -> Tensor:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(64, 64, device=cuda)) for _ in range(50)]
        optimizer = torch.optim.AdamW(parameters, **options)
        generator = torch.Generator(cuda).manual_seed(1)
        for _ in range(10):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, device=cuda, generator=generator)
            step(optimizer)
        return torch.stack([parameter.detach() for parameter in parameters])

    assert torch.equal(run(lambda optimizer: optimizer.step()), run(lambda optimizer: optimizers.step(optimizer, None)))


@pytest.mark.parametrize(
    "dtypes",
    [[torch.float32], [torch.float16], [torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]],
    ids=["fp32", "fp16", "bf16", "mixed"],
)
def test_one_value_that_is_not_finite_is_found(device: str, dtypes: list[torch.dtype]) -> None:
    tensors = [torch.randn(257, 33, device=device).to(dtypes[i % len(dtypes)]) for i in range(6)]
    tensors[4] = tensors[4].t()
    before = [tensor.clone() for tensor in tensors]
    assert not non_finite(tensors).item()
    assert all(map(torch.equal, tensors, before))
    for index in range(6):
        for value in ("nan", "inf", "-inf"):
            spoilt = [tensor.clone() for tensor in tensors]
            spoilt[index][3, 5] = float(value)
            assert non_finite(spoilt).item()


@pytest.mark.parametrize("name", ["augmix", "randaugment"])
def test_batches_are_augmented_and_mixed_on_the_device(device: str, name: str) -> None:
    pytest.importorskip("hocket_vision")
    devices = []

    class Look(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            images, mixture = state.batch
            devices.extend(tensor.device.type for tensor in (images, mixture.first, mixture.second))

    images, labels = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    hocket.Trainer(
        model=nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), loss=F.cross_entropy, train_data=[(images, labels)],
        optimizer="sgd(lr=0.1)", duration="2ep", device=device, algorithms=[{name: {"batch": True}}, "mixup"],
        callbacks=[Look()], microbatch=3,
    ).fit()  # fmt: skip
    assert devices == [device] * 6
