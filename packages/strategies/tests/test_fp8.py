"""Linear layers in float8 against torchao by hand, and against the formula in double precision."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket_strategies import FP8
from hocket_strategies.precisions.fp8 import _check

float8 = pytest.importorskip("torchao.float8")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 16), nn.Linear(16, 3))


def data():
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 32, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(4)]


def classes(module: nn.Module) -> dict[str, str]:
    return {name: type(part).__name__ for name, part in module.named_modules() if isinstance(part, nn.Linear)}


def in_eight_bits(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """What float8 e4m3 makes of it with one scale for everything, or a power of 2 for each slice along ``dim``; in float64."""
    largest = tensor.abs().amax() if dim is None else tensor.abs().amax(dim, keepdim=True)
    scale = 448 / largest.double()
    if dim is not None:
        scale = 2 ** scale.log2().floor()
    return (tensor.double() * scale).float().to(torch.float8_e4m3fn).double() / scale


@pytest.mark.parametrize("recipe, dim", [("tensorwise", None), ("rowwise", 1)])
def test_products_are_those_of_eight_bits(recipe, dim):
    """To the rounding of the bfloat16 that comes out, which is finer than that of float8."""
    torch.manual_seed(1)
    precision = FP8(recipe)
    model = nn.Sequential(nn.Linear(32, 64, bias=False))
    inputs = torch.randn(48, 32).bfloat16().float()
    weight = model[0].weight.detach().clone()
    precision.convert_module(model)
    with precision.forward_context():
        found = model(inputs)
    assert found.dtype is torch.bfloat16
    expected = in_eight_bits(inputs, dim) @ in_eight_bits(weight, dim).T
    exact = inputs.double() @ weight.double().T
    error = ((found.double() - expected).norm() / expected.norm()).item()
    assert error < 6e-3 < 0.02 < ((found.double() - exact).norm() / exact.norm()).item()


def test_training_equals_torchao_by_hand(tmp_path):
    model, expected = network(), network()
    config = float8.Float8LinearConfig(emulate=True, pad_inner_dim=True)
    float8.convert_to_float8_training(expected, config=config, module_filter_fn=lambda _, name: name in ("0", "3"))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for inputs, targets in data():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(expected(inputs), targets)
        loss.backward()
        optimizer.step()
    before = list(model.parameters())
    hocket.Trainer(
        model=model,
        loss=F.cross_entropy,
        train_data=data(),
        optimizer=torch.optim.SGD(before, lr=0.1),
        precision="fp8",
        device="cpu",
        duration="1ep",
        folder=tmp_path,
    ).fit()
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert {parameter.dtype for parameter in before} == {torch.float32}
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_which_layers_are_converted():
    class Mine(nn.Linear):
        pass

    model = nn.ModuleDict({"fits": nn.Linear(16, 32), "odd": nn.Linear(16, 3), "mine": Mine(16, 16)})
    model["head"] = nn.ModuleList([nn.Linear(16, 16)])
    model["again"] = model["fits"]
    FP8(keep=["head"]).convert_module(model)
    assert classes(model) == {"fits": "Float8Linear", "odd": "Linear", "mine": "Mine", "head.0": "Linear"}
    assert model["again"] is model["fits"]


def test_weights_keep_their_names(tmp_path):
    model = network()
    before = copy.deepcopy(model.state_dict())
    FP8().convert_module(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# --- what is refused


def test_a_model_without_a_layer_that_fits():
    with pytest.raises(ValueError, match=r"multiples of 16.*precision='bf16'"):
        FP8().convert_module(nn.Sequential(nn.Linear(16, 3)))


def test_arguments():
    with pytest.raises(ValueError, match="recipe='columnwise'; use one of 'tensorwise', 'rowwise'"):
        FP8("columnwise")
    with pytest.raises(TypeError, match=r"keep='head'.*\['head'\]"):
        FP8(keep="head")


def test_hardware_without_float8(monkeypatch):
    """There is no such GPU where this runs, so torch is told what it would say there."""
    with pytest.raises(ValueError, match=r"which mps devices cannot do.*'emulate': True"):
        _check(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"the A100 \(compute capability 8.0\)"):
        _check(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    _check(torch.device("cuda"))


def test_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match=r"pip install 'torchao>="):
        FP8().convert_module(network())
