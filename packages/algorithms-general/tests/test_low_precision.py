"""Norms in low precision against the same norms in float64, and against what autocast does without them."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import hocket
from hocket import NoEffectWarning
from hocket_general import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from hocket_general.functional import low_precision_groupnorm, low_precision_layernorm
from hocket_testkit import AlgorithmConformance
from hocket_testkit.reference import batch_norm_network

ROUNDING = {"test_works_with_microbatches": (2e-2, "sums in bfloat16")}


class TestLowPrecisionLayerNorm(AlgorithmConformance):
    exempt = {"test_works_with_microbatches": "the model that has a layer norm has batch norm, too"}

    def make(self):
        return LowPrecisionLayerNorm()

    def model(self):
        return batch_norm_network()

    def arguments(self):
        return {"precision": "bf16"}


class TestLowPrecisionGroupNorm(AlgorithmConformance):
    tolerances = ROUNDING

    def make(self):
        return LowPrecisionGroupNorm()

    def arguments(self):
        return {"precision": "bf16"}


CASES = [
    (low_precision_layernorm, LowPrecisionLayerNorm, lambda **o: nn.LayerNorm(8, **o)),
    (low_precision_groupnorm, LowPrecisionGroupNorm, lambda **o: nn.GroupNorm(2, 8, **o)),
]
KINDS = pytest.mark.parametrize(("function", "algorithm", "make"), CASES, ids=["layernorm", "groupnorm"])


def drawn(norm):
    for parameter in norm.parameters():
        nn.init.normal_(parameter, std=0.5)
    return norm


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"affine": False}], ids=str)
def test_the_norm_runs_in_the_dtype_of_autocast_on_any_device(function, algorithm, make, dtype, options):
    """Composer asks for CUDA's autocast only, so that norms on the CPU stay in float32."""
    torch.manual_seed(0)
    if options == {"affine": False} and function is low_precision_layernorm:
        options = {"elementwise_affine": False}
    if options == {"bias": False} and function is low_precision_groupnorm:
        options = {"affine": True}
    norm = drawn(make(**options))
    model, _ = function(nn.Sequential(copy.deepcopy(norm)))
    x = torch.randn(6, 8, requires_grad=True)
    with torch.autocast("cpu", dtype):
        assert norm(x).dtype == torch.float32  # what autocast does by itself
        out = model(x)
        assert out.dtype == dtype
    exact = norm.double()(x.double())
    torch.testing.assert_close(out.double(), exact, rtol=0.03, atol=0.03)
    out.float().pow(2).sum().backward()
    assert x.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in model.parameters())
    (expected,) = torch.autograd.grad(exact.pow(2).sum(), x)
    torch.testing.assert_close(x.grad, expected, rtol=0.1, atol=0.2)


@KINDS
def test_large_values_do_not_overflow_in_half_precision(function, algorithm, make):
    """The sum of squares of these is beyond float16; the kernels sum in float32."""
    model, _ = function(nn.Sequential(make()))
    x = torch.linspace(-3e4, 3e4, 16).reshape(2, 8)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    torch.testing.assert_close(out.float(), make()(x), rtol=1e-2, atol=1e-2)


@KINDS
def test_without_autocast_and_in_double_precision_nothing_changes(function, algorithm, make):
    norm = drawn(make())
    model, _ = function(nn.Sequential(copy.deepcopy(norm)))
    x = torch.randn(6, 8)
    assert torch.equal(model(x), norm(x))
    with torch.autocast("cpu", torch.bfloat16):
        wide = model.double()(x.double())
        assert wide.dtype == torch.float64 and torch.equal(wide, norm.double()(x.double()))
        with torch.autocast("cpu", enabled=False):
            assert model.float()(x).dtype == torch.float32
    assert model.to("meta")(x.to("meta")).shape == x.shape  # torch has no autocast for it


@KINDS
def test_parameters_keys_and_format_stay(function, algorithm, make):
    plain = nn.Sequential(make(), nn.Linear(8, 8))
    parameters, names = list(plain.parameters()), list(plain.state_dict())
    model, (replacement,) = function(plain)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names and replacement.name == "0"
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(4, 8)
        assert torch.equal(again(x), model(x))
        compiled = torch.compile(model[0], backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), model[0](x))
    with pytest.warns(NoEffectWarning, match="already applied"):
        assert function(model)[1] == []


def test_a_group_norm_keeps_channels_last():
    model, _ = low_precision_groupnorm(nn.Sequential(nn.GroupNorm(2, 8)))
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).is_contiguous(memory_format=torch.channels_last)


@KINDS
def test_subclasses_are_named(function, algorithm, make):
    norm = make()
    mine = type("Mine", (type(norm),), {"forward": lambda self, input: input})
    model = nn.Sequential(mine(*([8] if isinstance(norm, nn.LayerNorm) else [2, 8])), norm)
    with pytest.warns(UserWarning, match=r"0 \(Mine"):
        assert [each.name for each in function(model)[1]] == ["1"]


def trainer(*algorithms, model=None, **options):
    model = model or nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8))
    return model, hocket.Trainer(model=model, device="cpu", algorithms=list(algorithms), **options)


@KINDS
@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "fp64"])
def test_a_precision_without_16_bit_autocast_is_told_and_left_alone(function, algorithm, make, precision):
    if precision != "fp32":
        pytest.importorskip("hocket_strategies")
    with pytest.warns(NoEffectWarning, match="does not autocast to 16 bits"):
        model, made = trainer(algorithm(), precision=precision)
    assert [type(part) for part in model] == [nn.Linear, nn.LayerNorm, nn.GroupNorm]
    assert made.state.replacements == []


@KINDS
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_with_16_bit_autocast_is_used(function, algorithm, make, precision):
    if precision == "fp16":
        pytest.importorskip("hocket_strategies")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, made = trainer(algorithm(), precision=precision)
    assert len(made.state.replacements) == 1
    assert made.predict([torch.randn(4, 8)])[0].dtype in (torch.bfloat16, torch.float16)


class AddsNorms(hocket.Algorithm):
    """Surgery that makes layer norms (Source: this test)."""

    events = {hocket.Event.INIT}
    phase = hocket.Phase.MODEL

    def apply(self, event, state):
        state.model.append(nn.LayerNorm(8))


def test_norms_that_other_surgery_makes_are_replaced_whatever_the_order():
    for algorithms in ((LowPrecisionLayerNorm(), AddsNorms()), (AddsNorms(), LowPrecisionLayerNorm())):
        model, made = trainer(*algorithms, precision="bf16")
        assert [each.name for each in made.state.replacements] == ["1", "3"], model
