"""What ALiBi changes in a model, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    OpenAIGPTConfig,
    OpenAIGPTModel,
)

from hocket.surgery import NoEffectWarning
from hocket_nlp import linear_bias
from hocket_nlp.functional import alibi

POSITIONS = {
    "gpt2": "transformer.wpe",
    "bert": "bert.embeddings.position_embeddings",
    "roberta": "roberta.embeddings.position_embeddings",
    "opt": "model.decoder.embed_positions",
    "neox": "gpt_neox.rotary_emb",
    "llama": "model.rotary_emb",
    "mistral": "model.rotary_emb",
    "qwen3": "model.rotary_emb",
}
LEARNED = ("gpt2", "bert", "roberta", "opt")


def test_positions_are_gone_and_everything_else_is_as_it_was(build, family, implementation, tokens) -> None:
    model = build(family, implementation)
    before = {name: parameter for name, parameter in model.named_parameters()}
    same, changed = alibi(model, 64)
    assert same is model
    assert [change.name for change in changed] == [POSITIONS[family]]
    after = dict(model.named_parameters())
    assert before.keys() - after.keys() == ({f"{POSITIONS[family]}.weight"} if family in LEARNED else set())
    assert all(after[name] is before[name] for name in after)
    assert not [name for name in model.state_dict() if name.startswith(POSITIONS[family])]
    assert model.config._attn_implementation == linear_bias.IMPLEMENTATIONS[implementation]
    # RoBERTa numbers the positions of 64 tokens 2 to 65.
    assert model.config.max_position_embeddings == (66 if family == "roberta" else 64)
    with torch.no_grad():
        assert model(torch.cat([tokens] * 6, 1)).logits.shape == (2, 60, 61)


def test_order_of_tokens_matters_to_an_encoder_through_the_bias_alone(build, tokens) -> None:
    model = build("bert")
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.zero_()
        order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(tokens[:, order]).logits, model(tokens).logits[:, order], rtol=1e-4, atol=1e-4)
        alibi(model, 40)
        assert (model(tokens[:, order]).logits - model(tokens).logits[:, order]).abs().max() > 0.1


def test_random_numbers_modes_gradients_and_caches_are_untouched(build, family) -> None:
    model = build(family).train()
    model.base_model.get_input_embeddings().eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    alibi(model, 40)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert AttentionInterface()["hocket_alibi_sdpa"] is linear_bias.sdpa_attention


def test_applying_twice_changes_nothing_and_says_so(build, family, tokens) -> None:
    model, _ = alibi(build(family), 40)
    with torch.no_grad():
        want = model(tokens).logits
        with pytest.warns(NoEffectWarning, match="linear biases"):
            _, changed = alibi(model, 40)
        assert changed == []
        assert torch.equal(model(tokens).logits, want)


def test_applying_again_with_a_greater_length_makes_room(build, family) -> None:
    model, _ = alibi(build(family), 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        alibi(model, 90)
    with torch.no_grad():
        assert model(torch.full((1, 90), 7)).logits.isfinite().all()


def test_models_made_from_one_configuration_stay_independent(build, tokens) -> None:
    model = build("gpt2")
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        want = twin(tokens).logits
        alibi(model, 64)
        assert torch.equal(twin(tokens).logits, want)
        assert not torch.allclose(model(tokens).logits, want)
    assert (twin.config._attn_implementation, twin.config.n_positions) == ("sdpa", 32)


def test_models_inside_other_modules_are_found(build, tokens) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = build("gpt2"), build("bert").bert

    pair, changed = alibi(Pair(), 40)
    assert [change.name for change in changed] == ["left.transformer.wpe", "right.embeddings.position_embeddings"]
    alone, _ = alibi(build("gpt2"), 40)
    with torch.no_grad():
        assert torch.equal(pair.left(tokens).logits, alone(tokens).logits)


def test_half_precision(build, family, tokens) -> None:
    model, _ = alibi(build(family).to(torch.bfloat16), 40)
    with torch.no_grad():
        assert model(tokens).logits.dtype == torch.bfloat16


# --- copies, pickles, checkpoints


def test_copies_and_pickles_keep_the_bias(build, family, tokens, monkeypatch) -> None:
    model, _ = alibi(build(family), 40)
    with torch.no_grad():
        want = model(tokens).logits
        assert torch.equal(copy.deepcopy(model)(tokens).logits, want)
        pickled = pickle.dumps(model)
        for interface in (AttentionInterface, AttentionMaskInterface):  # as in a fresh process
            others = {k: v for k, v in interface._global_mapping.items() if not k.startswith("hocket")}
            monkeypatch.setattr(interface, "_global_mapping", others)
        assert torch.equal(pickle.loads(pickled)(tokens).logits, want)


def test_saved_models_are_exact_once_alibi_is_applied_again(build, family, implementation, tokens, tmp_path) -> None:
    model, _ = alibi(build(family, implementation), 64)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=implementation).eval()
    assert loaded.config.max_position_embeddings == model.config.max_position_embeddings
    with torch.no_grad():
        want = model(tokens).logits
        assert not torch.allclose(loaded(tokens).logits, want)  # positions are back, learned ones are random
        loaded, _ = alibi(loaded, 64)
        assert torch.equal(loaded(tokens).logits, want)


def test_state_dict_goes_into_another_model_with_biases(build, family, tokens) -> None:
    model, _ = alibi(build(family), 40)
    other, _ = alibi(build(family), 40)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        other.load_state_dict(model.state_dict(), strict=True)
        assert torch.equal(other(tokens).logits, model(tokens).logits)


# --- nothing is silent


def test_transformers_4_is_refused(build, monkeypatch) -> None:
    model = build("bert")
    # Not the module that this file imported: transformers replaces itself in sys.modules.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"transformers 5 or later, and 4\.57\.6.*pip install 'transformers>=5'"):
        alibi(model, 40)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_transformers_does_not_call_is_an_error(build, family, tokens, monkeypatch, masked) -> None:
    # So it was with BERT in transformers 4.57: the name was taken and the function never called.
    model = build(family)
    with torch.no_grad():
        want = model(tokens).logits
    for layer in model.modules():
        if hasattr(layer, "is_causal"):
            layer.config = copy.deepcopy(model.config)  # where the new name does not arrive
    with monkeypatch.context() as patch:
        if not masked:
            for name in ("create_causal_mask", "create_bidirectional_mask", "create_sliding_window_causal_mask"):
                patch.setattr(sys.modules[type(model).__module__], name, lambda **_: None, raising=False)
        error = "A trial forward pass .* failed" if masked else "called the biased attention in 0 of 2 layers"
        with pytest.raises(RuntimeError, match=error):
            alibi(model, 64)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, want)


@pytest.mark.parametrize("fault", ["no bias", "wrong sign", "no causality"])
def test_a_bias_that_does_not_arrive_is_an_error(build, implementation, monkeypatch, fault) -> None:
    real = linear_bias.slopes_in
    if fault == "no causality":
        mask = linear_bias.biased_mask
        monkeypatch.setattr(linear_bias, "biased_mask", lambda **arguments: torch.zeros_like(mask(**arguments)))
    else:
        factor = 0 if fault == "no bias" else -1
        monkeypatch.setattr(linear_bias, "slopes_in", lambda *given: factor * real(*given))
    with pytest.raises(RuntimeError, match=r"differ by .* from softmax\(-slope \* distance\)"):
        alibi(build("gpt2", implementation), 40)


def test_unsupported_models_are_named() -> None:
    with pytest.raises(TypeError, match=r"GPT2Model, BertModel, .* none in Linear.*alibi_policies"):
        alibi(nn.Linear(2, 2), 40)
    with pytest.raises(TypeError, match="none in OpenAIGPTModel"):
        alibi(OpenAIGPTModel(OpenAIGPTConfig(vocab_size=61, n_embd=24, n_layer=1, n_head=2)), 40)
    with pytest.raises(TypeError, match="BloomModel: it has linear biases of its own"):
        alibi(BloomModel(BloomConfig(vocab_size=61, hidden_size=24, n_layer=1, n_head=2)), 40)


def test_what_cannot_work_is_refused_before_anything_changes(build) -> None:
    model = build("gpt2")
    with pytest.raises(ValueError, match="1 or more"):
        alibi(model, 0)
    model.transformer.wpe = nn.Identity()
    with pytest.raises(ValueError, match=r"transformer\.wpe is Identity, not Embedding"):
        alibi(model, 40)
    model = build("gpt2")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"'flash_attention_2'.*set_attn_implementation\('sdpa'\)"):
        alibi(model, 40)
    with pytest.raises(ValueError, match="meta device"):
        alibi(build("gpt2").to("meta"), 40)
    with pytest.raises(ValueError, match="cross-attention"):
        alibi(build("gpt2", add_cross_attention=True), 40)
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        alibi(build("gpt2", "eager", reorder_and_upcast_attn=True), 40)
    assert isinstance(build("gpt2").transformer.wpe, nn.Embedding)


def test_attention_sharded_over_heads_is_refused(build) -> None:
    model, _ = alibi(build("gpt2"), 40)
    half = torch.randn(1, 3, 5, 4)
    with pytest.raises(NotImplementedError, match="3 of 6 attention heads"):
        linear_bias.sdpa_attention(model.transformer.h[0].attn, half, half, half, None)


def test_a_causal_encoder_class_is_biased_causally(build, implementation) -> None:
    size = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
    model = BertModel._from_config(
        BertConfig(vocab_size=61, is_decoder=True, **size), attn_implementation=implementation
    ).eval()
    alibi(model, 40)
    tokens = torch.arange(5, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0][:, :6], model(tokens[:, :6])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_importing_and_looking_for_a_policy_load_no_transformers() -> None:
    code = (
        "import sys, torch, hocket_nlp; from hocket_nlp import alibi_policies; hocket_nlp.functional.alibi, hocket_nlp.ALiBi;"
        "alibi_policies.policy_of(torch.nn.Linear(2, 2)); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
