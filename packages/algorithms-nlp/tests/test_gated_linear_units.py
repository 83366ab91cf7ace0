"""Gated linear units: the formula by hand in float64 for each architecture, the same function at first, weights, optimizers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import hocket
from hocket.surgery import update_optimizer
from hocket_nlp import GatedLinearUnits
from hocket_nlp.functional import gated_linear_units

FAMILIES = ["gpt2", "bert", "roberta", "opt", "neox"]
#: First and second projection by architecture, under the names in a layer.
PLACES = {
    "gpt2": ("mlp.c_fc", "mlp.c_proj"),
    "bert": ("intermediate.dense", "output.dense"),
    "roberta": ("intermediate.dense", "output.dense"),
    "opt": ("fc1", "fc2"),
    "neox": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}
OWN = {"gpt2": lambda x: F.gelu(x, approximate="tanh"), "opt": torch.relu}


def layers_of(model: Any, family: str) -> list[tuple[str, Any, Any]]:
    """Names of the first projections, and both projections, by layer."""
    first, second = PLACES[family]
    names = [name for name, _ in model.named_modules() if name.endswith(f".{first}")]
    return [(n, model.get_submodule(n), model.get_submodule(n.removesuffix(first) + second)) for n in names]


def linear(x: Tensor, layer: Any) -> Tensor:
    weight = layer.weight.T if hasattr(layer, "nf") else layer.weight
    return x @ weight.T + (0 if layer.bias is None else layer.bias)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (None, None),
        ("silu", lambda x: x * torch.sigmoid(x)),
        ("sigmoid", torch.sigmoid),
        ("linear", lambda x: x),
        (torch.tanh, torch.tanh),
        (nn.ReLU(), torch.relu),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_feed_forward_layers_are_those_of_the_formula(
    tiny: Any, tokens: Tensor, family: str, activation: Any, function: Any
) -> None:
    """Shazeer 2020, eq. 6: (act(x W + b) * (x V + c)) W2 + b2."""
    model = tiny(family).double().eval()
    _, replaced = gated_linear_units(model, activation, init="normal", generator=torch.Generator().manual_seed(1))
    assert [isinstance(each.new, nn.Identity) for each in replaced] == [False, False, True, True]
    seen: dict[Any, tuple[Tensor, Tensor]] = {}
    layers = layers_of(model, family)
    for _, first, second in layers:
        first.gate.bias.data.normal_()
        first.register_forward_hook(lambda module, args, output: seen.update({module: (args[0], output)}))
        second.register_forward_hook(lambda module, args, output: seen.update({module: (args[0], output)}))
    model(tokens)
    act = function or OWN.get(family, F.gelu)
    for name, first, second in layers:
        x, _ = seen[first]
        hidden, output = seen[second]
        expected = act(linear(x, first)) * (x @ first.gate.weight.T + first.gate.bias)
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12, msg=name)
        torch.testing.assert_close(output, linear(expected, second), rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_identity_begins_as_the_model_was_and_learns_the_gate(tiny: Any, tokens: Tensor, family: str) -> None:
    model = tiny(family)
    before = model(tokens).logits
    state = dict(model.state_dict(keep_vars=True))
    gated_linear_units(model)
    assert torch.equal(model(tokens).logits, before)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value for name, value in state.items())
    new = sorted(after.keys() - state.keys())
    assert new == sorted(
        f"{name}.gate.{part}" for name, _, _ in layers_of(model, family) for part in ("weight", "bias")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    for _, first, _ in layers_of(model, family):
        rows = first.gate.weight[first.gate.weight.any(1)]  # without units that relu switches off
        assert len(rows) > 20 and len(rows.unique(dim=0)) == len(rows)
    assert not torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_paper_has_no_biases(tiny: Any, tokens: Tensor, family: str) -> None:
    model = tiny(family).eval()
    gated_linear_units(model, init="normal", bias=False, gate_bias=False)
    inputs = torch.randn(3, 32)
    for name, first, _ in layers_of(model, family):
        assert f"{name}.bias" not in model.state_dict() and first.gate.bias is None
        weight = first.weight.T if family == "gpt2" else first.weight
        expected = OWN.get(family, F.gelu)(inputs @ weight.T) * (inputs @ first.gate.weight.T)
        torch.testing.assert_close(first(inputs), expected, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(model(tokens).logits).all()


def test_normal_gates_have_variance_one_for_normalised_inputs() -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 1024}
    model, _ = gated_linear_units(BertModel(BertConfig(**sizes, vocab_size=16)), init="normal")
    gate = model.encoder.layer[0].intermediate.dense.gate
    out = gate(F.layer_norm(torch.randn(64, 256), (256,)))
    assert out.var().item() == pytest.approx(1, rel=0.05) and not gate.bias.any()


def test_the_number_of_parameters_is_the_stated_one() -> None:
    """A layer of BERT-base: 768 * 3072 weights and 3072 biases more."""
    model = BertModel(BertConfig(num_hidden_layers=1, vocab_size=16))
    before = sum(each.numel() for each in model.parameters())
    gated_linear_units(model)
    assert sum(each.numel() for each in model.parameters()) - before == 768 * 3072 + 3072


def test_draws_come_from_the_generator_only(tiny: Any) -> None:
    def gates(seed: int) -> list[Tensor]:
        torch.manual_seed(7)
        model, _ = gated_linear_units(tiny("gpt2"), init="normal", generator=torch.Generator().manual_seed(seed))
        return [first.gate.weight for _, first, _ in layers_of(model, "gpt2")]

    one, again, other = gates(1), gates(1), gates(2)
    assert all(map(torch.equal, one, again)) and not torch.equal(one[0], other[0]) and not torch.equal(one[0], one[1])
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model = tiny("gpt2")
    torch.set_rng_state(before)
    gated_linear_units(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_dtype_and_mode_are_those_of_the_model(tiny: Any) -> None:
    model, _ = gated_linear_units(tiny("bert").bfloat16().eval())
    layer = model.bert.encoder.layer[0].intermediate
    assert layer.dense.gate.weight.dtype == torch.bfloat16
    assert not layer.dense.gate.training and not layer.intermediate_act_fn.training


def test_activations_that_are_functions_move_too(tiny: Any, tokens: Tensor) -> None:
    model = tiny("bert")
    for layer in model.bert.encoder.layer:
        del layer.intermediate.intermediate_act_fn
        layer.intermediate.intermediate_act_fn = torch.tanh
    before = model(tokens).logits
    gated_linear_units(model)
    assert torch.equal(model(tokens).logits, before)
    assert isinstance(layer.intermediate.intermediate_act_fn, nn.Identity)


def test_models_are_copied_and_pickled(tiny: Any, tokens: Tensor) -> None:
    for family in ("gpt2", "bert"):
        model, _ = gated_linear_units(tiny(family), init="normal")
        expected = model(tokens).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(tokens).logits, expected) and repr(other) == repr(model)


def test_an_optimizer_is_updated(tiny: Any) -> None:
    model = tiny("opt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_optimizer(optimizer, gated_linear_units(model, bias=False)[1])
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())


@pytest.mark.filterwarnings("ignore:.* was in eval mode")
def test_a_trainer_trains_saves_and_loads_the_gates(tiny: Any, tokens: Tensor) -> None:
    def make() -> hocket.Trainer:
        return hocket.Trainer(
            model=tiny("gpt2"), train_data=[{"input_ids": tokens, "labels": tokens}] * 3, optimizer="adamw(lr=0.01)",
            duration="2ep", device="cpu", algorithms=[{"gated-linear-units": {"activation": "silu", "init": "normal"}}],
        )  # fmt: skip

    trainer, other = make(), make()
    trainer.fit("1ep")
    other.load_state_dict(trainer.state_dict())
    trainer.fit(), other.fit()
    theirs = other.model_state_dict()
    assert any("gate" in name for name in theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in trainer.model_state_dict().items())


def test_the_plan_names_each_projection(tiny: Any) -> None:
    assert GatedLinearUnits().touches(tiny("opt")) == [
        f"model.decoder.layers.{layer}.fc1: Linear -> Gated, with activation_fn" for layer in range(2)
    ]


# --- warnings and errors


def test_a_second_time_changes_nothing(tiny: Any) -> None:
    model, _ = gated_linear_units(tiny("bert"))
    with pytest.warns(hocket.NoEffectWarning, match=r"already applied to this BertForMaskedLM, in 2 modules"):
        assert gated_linear_units(model)[1] == []
    assert GatedLinearUnits().touches(model) == []


def test_models_with_gates_of_their_own_are_left_alone(tiny: Any) -> None:
    with pytest.warns(hocket.NoEffectWarning, match=r"LlamaForCausalLM.* have gates already: .*gate_proj"):
        assert gated_linear_units(tiny("llama"))[1] == []


def test_other_models_are_left_alone() -> None:
    with pytest.warns(hocket.NoEffectWarning, match=r"no BertIntermediate, .*OPTDecoderLayer of transformers"):
        gated_linear_units(nn.Sequential(nn.Linear(2, 2)))


def test_projections_of_unknown_shape_are_refused(tiny: Any) -> None:
    model = tiny("gpt2")
    model.transformer.h[1].mlp.c_fc = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 64))
    with pytest.raises(ValueError, match=r"shape of transformer\.h\.1\.mlp\.c_fc, a Sequential"):
        gated_linear_units(model)
    assert not isinstance(model.transformer.h[0].mlp.act, nn.Identity)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"init": "zero"}, "'identity' or 'normal'"),
        ({"gate_bias": False}, r"write init='normal', or leave out gate_bias"),
    ],
)
def test_arguments_are_checked_at_once(arguments: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        GatedLinearUnits(**arguments)


def test_unknown_activations_are_named(tiny: Any) -> None:
    with pytest.raises(ValueError, match=r"no activation 'swiglu'. Give 'silu'"):
        gated_linear_units(tiny("gpt2"), "swiglu")


def test_models_without_storage_are_refused(tiny: Any) -> None:
    model = tiny("gpt2").to("meta")
    with pytest.raises(
        ValueError, match=r"gated_linear_units was given GPT2LMHeadModel, whose .*wte.weight is on the meta .*to_empty"
    ):
        gated_linear_units(model)
    assert not any("norm." in name or "gate" in name for name in model.state_dict())
