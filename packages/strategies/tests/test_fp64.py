"""Double precision throughout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket_strategies import FP64


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(2)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        made_here = torch.ones(2)
        return self.norm(self.layer(x)) * made_here * (self.phase * self.turn).abs()


def test_weights_and_buffers_are_converted_in_place():
    module = Everything()
    weight = module.layer.weight
    assert FP64().convert_module(module) is module and module.layer.weight is weight
    dtypes = {name: t.dtype for name, t in [*module.named_parameters(), *module.named_buffers()]}
    assert dtypes == {
        "layer.weight": torch.float64,
        "layer.bias": torch.float64,
        "norm.weight": torch.float64,
        "norm.bias": torch.float64,
        "norm.running_mean": torch.float64,
        "norm.running_var": torch.float64,
        "norm.num_batches_tracked": torch.int64,
        "phase": torch.complex128,
        "turn": torch.complex128,
        "mask": torch.bool,
    }


def test_batches_are_converted():
    given = {"x": torch.ones(2, dtype=torch.float16), "z": [torch.ones(2, dtype=torch.complex64)], "y": torch.arange(2)}
    converted = FP64().convert_batch(given)
    assert converted["x"].dtype == torch.float64
    assert converted["z"][0].dtype == torch.complex128
    assert converted["y"].dtype == torch.int64
    assert given["x"].dtype == torch.float16


def test_the_models_own_tensors_are_double_and_only_there():
    precision = FP64()
    module = precision.convert_module(Everything())
    with precision.forward_context():
        outputs = module(torch.randn(4, 3, dtype=torch.float64))
        assert torch.zeros(1).dtype == torch.float64
    assert outputs.dtype == torch.float64
    with pytest.raises(ZeroDivisionError), precision.forward_context():
        1 / 0  # noqa: B018
    assert torch.zeros(1).dtype == torch.float32


def test_gradients_pass_torchs_check():
    """Finite differences agree to 1e-6 in double precision only."""
    precision = FP64()
    module = precision.convert_module(Everything()).eval()
    x = precision.convert_batch(torch.randn(3, 3)).requires_grad_()
    with precision.forward_context():
        assert torch.autograd.gradcheck(module, x)


def test_a_device_without_doubles_is_refused():
    class Elsewhere(nn.Module):
        def parameters(self, recurse=True):
            class Apple:
                device = torch.device("mps")

            return iter([Apple()])

    with pytest.raises(ValueError, match=r"no 64-bit floats.*device='cpu'"):
        FP64().convert_module(Elsewhere())


def test_training_equals_a_plain_double_loop(tmp_path):
    data = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    loss = nn.MSELoss()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in data:
        optimizer.zero_grad()
        value = loss(plain(inputs.double()), targets.double())
        value.backward()
        optimizer.step()
    trainer = hocket.Trainer(
        model=model,
        loss=loss,
        train_data=data,
        eval_data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        precision="fp64",
        device="cpu",
        duration="1ep",
        folder=tmp_path,
    )
    metrics = trainer.fit().metrics
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        values = [loss(plain(inputs.double()), targets.double()).item() for inputs, targets in data]
    assert metrics["eval/loss"] == pytest.approx(sum(values) / 3, rel=1e-14)
