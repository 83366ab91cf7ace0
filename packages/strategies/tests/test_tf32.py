"""TensorFloat-32: when it is allowed, and that it is taken back. What it computes shows on NVIDIA GPUs only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket_strategies import TF32


class Probe(nn.Module):
    """Notes torch's setting in the forward and backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: list[tuple[str, str]] = []

    def forward(self, x):
        self.seen.append(("forward", torch.get_float32_matmul_precision()))
        outputs = self.layer(x)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: self.seen.append(("backward", torch.get_float32_matmul_precision())))
        return outputs


class Outside(hocket.Callback):
    """Notes it everywhere else in a step."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def _note(self, state):
        self.seen.add(torch.get_float32_matmul_precision())

    before_forward = after_forward = before_backward = after_backward = after_train_batch = batch_end = _note


DATA = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(3)]


def trained(folder, precision, model, **changes):
    trainer = hocket.Trainer(
        **{
            "model": model,
            "loss": F.cross_entropy,
            "train_data": DATA,
            "eval_data": DATA,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "precision": precision,
            "device": "cpu",
            "duration": "1ep",
            "folder": folder,
            **changes,
        }
    )
    trainer.fit()
    return trainer


@pytest.fixture(params=["highest", "high", "medium"])
def setting(request):
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


def test_it_is_allowed_in_forward_and_backward_only(tmp_path, setting):
    model, outside = Probe(), Outside()
    trainer = trained(tmp_path, TF32(), model, callbacks=[outside])
    trainer.predict(DATA)
    assert model.seen == [("forward", "high"), ("backward", "high")] * 3 + [("forward", "high")] * 6
    assert outside.seen == {setting} and torch.get_float32_matmul_precision() == setting


def test_it_is_taken_back_after_an_error(tmp_path, setting):
    class Failing(Probe):
        def forward(self, x):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, TF32(), Failing())
    assert torch.get_float32_matmul_precision() == setting


@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
def test_torchs_newer_setting_is_put_back(precision):
    """Where the two contradict each other torch refuses to tell the older one."""
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    try:
        backend.fp32_precision = precision
        with TF32().forward_context():
            assert torch.get_float32_matmul_precision() == "high" and backend.fp32_precision == "tf32"
        assert backend.fp32_precision == precision
    finally:
        backend.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


def test_on_a_cpu_nothing_changes(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets in DATA:
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    trained(tmp_path, TF32(), model)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs an NVIDIA GPU of 2020 on",
)
def test_on_a_gpu_products_have_ten_bits():
    left, right = torch.randn(2, 256, 256, device="cuda")
    exact = left.double() @ right.double()
    with TF32().forward_context():
        rounded = left @ right
    error = ((rounded.double() - exact).norm() / exact.norm()).item()
    assert 2**-14 < error < 2**-9
