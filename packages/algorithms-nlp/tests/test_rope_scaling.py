"""RoPE scaling: frequencies from the papers' formulas in float64, fractional positions, folders of transformers, errors."""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, ModernBertConfig, ModernBertModel

import hocket
from hocket_nlp import RoPEScaling
from hocket_nlp.functional import rope_scaling

KINDS = ["linear", "ntk", "dynamic-ntk", "yarn"]


def rotary_of(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "inv_freq"))


def plain(dimensions: int, theta: float = 1e4) -> Tensor:
    """theta^(-2i/d), in float64."""
    return theta ** (-torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions)


def yarn(dimensions: int, factor: float, length: int, fast: float = 32, slow: float = 1, theta: float = 1e4) -> Tensor:
    """Peng et al. 2023, section 3, with the ramp over dimensions of the authors' code.

    Dimension pair i turns r(i) = L * theta^(-2i/d) / 2 pi times in L tokens, hence i(r) = d ln(L / 2 pi r) / (2 ln theta).
    """

    def pair(turns: float) -> float:
        return dimensions * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), dimensions - 1)
    ramp = ((torch.arange(dimensions // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    original = plain(dimensions, theta)
    return original * (1 - ramp) + original / factor * ramp


@pytest.mark.parametrize("factor", [2.0, 4.0, 7.5])
@pytest.mark.parametrize(("kind", "dimensions"), [("llama", 8), ("neox", 4), ("qwen3", 8)])
def test_frequencies_are_those_of_the_papers(tiny: Any, kind: str, dimensions: int, factor: float) -> None:
    options: dict[str, Any] = {}
    if kind == "neox":  # a part of each head turns
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    expected = {
        "linear": plain(dimensions) / factor,
        "ntk": plain(dimensions, 1e4 * factor ** (dimensions / (dimensions - 2))),
        "yarn": yarn(dimensions, factor, 32),
    }
    for scaling, frequencies in expected.items():
        model, (replaced,) = rope_scaling(tiny(kind, **options), factor, scaling)
        rotary = rotary_of(model)
        assert rotary is replaced.new and type(rotary) is type(replaced.old)
        torch.testing.assert_close(rotary.inv_freq.double(), frequencies, rtol=2e-6, atol=0)
        temperature = 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
        assert rotary.attention_scaling == pytest.approx(temperature, rel=1e-12)
        assert model.config.max_position_embeddings == round(32 * factor)


@pytest.mark.parametrize(("fast", "slow"), [(32, 1), (8, 2), (4, 0.5)])
def test_yarn_on_a_head_of_real_size(tiny: Any, fast: float, slow: float) -> None:
    """128 dimensions and 4096 tokens, with the ends of the ramp where the paper's equation has them."""
    options = {
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    model, _ = rope_scaling(tiny("llama", heads=2, **options), 8, beta_fast=fast, beta_slow=slow)
    found, original = rotary_of(model).inv_freq.double(), plain(128, 5e5)
    torch.testing.assert_close(found, yarn(128, 8, 4096, fast, slow, 5e5), rtol=2e-6, atol=0)
    turns = 4096 * original / (2 * math.pi)
    ratio = found / original
    near = original[1] / original[0]  # the authors round the ends of the ramp to whole dimensions
    assert ratio[turns > fast / near].sub(1).abs().max() < 1e-5
    assert ratio[turns < slow * near].sub(1 / 8).abs().max() < 1e-5
    assert (ratio.diff() < 1e-5).all() and len({*ratio.tolist()}) > 5


def test_yarns_temperature_can_be_given(tiny: Any) -> None:
    model, _ = rope_scaling(tiny("llama"), 4, attention_factor=1.5)
    cosine, _ = rotary_of(model)(torch.zeros(1, 1, 32), torch.zeros(1, 1, dtype=torch.long))
    assert torch.equal(cosine, torch.full_like(cosine, 1.5))


def test_linear_scaling_is_position_interpolation(tiny: Any, tokens: Tensor) -> None:
    """Chen et al. 2023, eq. 4: f'(x, m) = f(x, m L / L'); transformers takes fractional positions."""
    model = tiny("llama").eval()
    expected = model(tokens, position_ids=torch.arange(10)[None] / 4).logits
    scaled, _ = rope_scaling(model, 4, "linear")
    torch.testing.assert_close(scaled(tokens).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1, 3])
def test_dynamic_scaling_begins_beyond_the_original_length(tiny: Any, factor: float) -> None:
    model = tiny("llama").eval()
    before = model(torch.arange(32)[None]).logits
    scaled, _ = rope_scaling(model, factor, "dynamic-ntk")
    assert torch.equal(scaled(torch.arange(32)[None]).logits, before)
    scaled(torch.arange(50)[None])
    theta = 1e4 * (factor * 50 / 32 - (factor - 1)) ** (8 / 6)
    torch.testing.assert_close(rotary_of(scaled).inv_freq.double(), plain(8, theta), rtol=2e-6, atol=0)
    again = scaled(torch.arange(31)[None]).logits  # transformers goes back for shorter sequences
    torch.testing.assert_close(again, before[:, :31], rtol=1e-5, atol=1e-5)
    assert scaled.config.max_position_embeddings == 32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "neox"])
def test_a_folder_of_transformers_keeps_it(tiny: Any, family: str, kind: str, tmp_path: Path) -> None:
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    model = tiny(family, **options if family == "neox" else {}).eval()
    ids = torch.arange(60)[None]
    before = model(ids).logits
    rope_scaling(model, 4, kind)
    expected = model(ids).logits
    assert (expected - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, expected)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    with pytest.warns(hocket.NoEffectWarning, match=f"scaled by {kind} and 4 already"):
        rope_scaling(loaded, 4.0, kind)
    assert torch.equal(loaded(ids).logits, expected)
    with pytest.raises(ValueError, match=r"scaled already: .*'factor': 4"):
        rope_scaling(loaded, 8, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_makes_the_same_model(tiny: Any, kind: str) -> None:
    """A new model from the configuration, with these weights, is the scaled model."""
    model, _ = rope_scaling(tiny("llama"), 4, kind)
    other = LlamaForCausalLM(copy.deepcopy(model.config))
    other.load_state_dict(model.state_dict())
    ids = torch.arange(60)[None]
    assert torch.equal(model.eval()(ids).logits, other.eval()(ids).logits)


def test_the_original_length_can_be_given(tiny: Any) -> None:
    model, _ = rope_scaling(tiny("llama"), 4, original_max_position_embeddings=16)
    assert model.config.max_position_embeddings == 64
    torch.testing.assert_close(rotary_of(model).inv_freq.double(), yarn(8, 4, 16), rtol=2e-6, atol=0)
    with pytest.warns(hocket.NoEffectWarning):
        rope_scaling(model, 4, original_max_position_embeddings=16)
    with pytest.raises(ValueError, match="scaled already"):
        rope_scaling(model, 4, original_max_position_embeddings=32)


def test_models_of_the_same_configuration_keep_theirs(tiny: Any) -> None:
    model = tiny("llama")
    other = LlamaForCausalLM(model.config)
    assert other.config is model.config
    rope_scaling(model, 4, "linear")
    assert other.config.rope_parameters["rope_type"] == "default" and other.config.max_position_embeddings == 32
    assert model.model.layers[0].self_attn.config is model.config is rotary_of(model).config is not other.config


def test_the_new_frequencies_have_device_and_dtype_of_the_old(tiny: Any) -> None:
    model, _ = rope_scaling(tiny("llama").to("meta").bfloat16(), 4)
    assert rotary_of(model).inv_freq.is_meta and rotary_of(model).inv_freq.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_models_on_the_meta_device_are_scaled_when_transformers_initializes_them(tiny: Any, kind: Any) -> None:
    model, expected = rope_scaling(tiny("llama").to("meta"), 4, kind)[0], rope_scaling(tiny("llama"), 4, kind)[0]
    model.to_empty(device="cpu")
    model._init_weights(rotary_of(model))
    assert torch.equal(rotary_of(model).inv_freq, rotary_of(expected).inv_freq)
    assert rotary_of(model).attention_scaling == rotary_of(expected).attention_scaling


def test_models_inside_other_modules_are_found(tiny: Any) -> None:
    pair = nn.ModuleDict({"one": tiny("llama"), "two": tiny("neox")})
    _, replaced = rope_scaling(pair, 2)
    assert sorted(each.name for each in replaced) == ["one.model.rotary_emb", "two.gpt_neox.rotary_emb"]


# --- in training


@pytest.mark.filterwarnings("ignore:.* was in eval mode")
def test_a_trainer_scales_once_before_training_and_says_so(tiny: Any, tmp_path: Path) -> None:
    model, algorithm = tiny("llama"), RoPEScaling(2, "linear")
    assert algorithm.touches(model) == ["model.rotary_emb: LlamaRotaryEmbedding, linear by 2"]
    ids = torch.arange(60)[None]
    batch = {"input_ids": ids, "labels": ids}
    trainer = hocket.Trainer(
        model=model,
        train_data=[batch] * 3,
        optimizer="sgd(lr=0.1)",
        duration="1ep",
        device="cpu",
        algorithms=[algorithm],
    )
    assert rotary_of(model).rope_type == "linear" and algorithm.touches(model) == []
    assert math.isfinite(trainer.fit().metrics["train/loss"])
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["factor"] == 2


# --- errors and warnings


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_a_factor_of_one_changes_nothing(tiny: Any, kind: str) -> None:
    model = tiny("llama")
    config = copy.deepcopy(model.config.to_dict())
    with pytest.warns(hocket.NoEffectWarning, match="stay as they are with factor=1"):
        _, replaced = rope_scaling(model, 1, kind)
    assert replaced == [] and model.config.to_dict() == config


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bert"])
def test_models_without_rotary_positions_are_refused(tiny: Any, kind: str) -> None:
    model = tiny(kind)
    with pytest.raises(TypeError, match=rf"rotary positions.*none in {type(model).__name__}"):
        rope_scaling(model, 4)


def test_scaled_models_of_others_are_refused(tiny: Any) -> None:
    scaled = tiny("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match=r"scaled already: .*'linear'.*original positions"):
        rope_scaling(scaled, 2, "linear")


def test_layers_with_positions_of_several_kinds_are_refused() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16}
    special = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0)
    model = ModernBertModel(ModernBertConfig(**sizes, **special, vocab_size=60))
    with pytest.raises(ValueError, match=r"layers have several: sliding_attention, full_attention"):
        rope_scaling(model, 4)


def test_two_dimensions_have_no_ntk(tiny: Any) -> None:
    model = tiny("neox")  # a quarter of 8 dimensions
    with pytest.raises(ValueError, match=r"only 2 dimensions.*kind='linear' or 'yarn'"):
        rope_scaling(model, 4, "ntk")
    assert model.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"factor": 2, "kind": "ntk-aware"}, r"'ntk-aware'. Give one of 'linear', 'ntk'"),
        ({"factor": 2, "kind": "ntk", "beta_fast": 8}, r"YaRN's: leave them out with kind='ntk'"),
        ({"factor": 2, "beta_fast": 1}, "beta_fast is above beta_slow"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        RoPEScaling(**arguments)


def test_nothing_is_logged_by_transformers(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Such as unknown keys or a factor that does not match the lengths."""
    for kind in KINDS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, _ = rope_scaling(tiny("llama"), 4, kind)
            model.config.validate_rope()
    assert "rope" not in caplog.text.lower()
