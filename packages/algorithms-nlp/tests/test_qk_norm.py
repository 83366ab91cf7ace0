"""QK norm: attention of each architecture by hand in float64, Qwen3 as another implementation, optimizers, saving, errors."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartModel, GPT2Config, GPT2Model, T5Config, T5Model

import hocket
from hocket.surgery import update_optimizer
from hocket_nlp import QKNorm
from hocket_nlp.functional import normalize_heads, qk_norm

FAMILIES = ["gpt2", "bert", "roberta", "llama", "neox", "opt"]


def attentions_of(model: Any) -> list[Any]:
    """The attention modules, of the second layer too."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith(
            ("SelfAttention", "GPT2Attention", "LlamaAttention", "XAttention", "OPTAttention")
        )
    ]


def weights_of(attention: Any) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[Any, Any]]:
    """Weights ``(out, in)`` and biases of queries, keys, values and the output; and the two norms."""
    if hasattr(attention, "c_attn"):
        c = attention.c_attn
        parts = list(zip(c.weight.T.chunk(3), c.bias.chunk(3), strict=True))
        return [*parts, (attention.c_proj.weight.T, attention.c_proj.bias)], (c.q_norm, c.k_norm)
    if hasattr(attention, "query_key_value"):
        c, d = attention.query_key_value, attention.head_size
        rows = torch.arange(len(c.weight)).reshape(-1, 3, d)  # head by head
        parts = [(c.weight[rows[:, i].flatten()], c.bias[rows[:, i].flatten()]) for i in range(3)]
        return [*parts, (attention.dense.weight, attention.dense.bias)], (c.q_norm, c.k_norm)
    names = ("query", "key", "value") if hasattr(attention, "query") else ("q_proj", "k_proj", "v_proj")
    layers = [getattr(attention, name) for name in names]
    out = getattr(attention, "o_proj", None) or getattr(attention, "out_proj", None)
    parts = [(layer.weight, layer.bias) for layer in layers]
    eye = torch.eye(layers[0].out_features, dtype=torch.float64)  # BERT's output is another module
    return [*parts, (out.weight, out.bias) if out else (eye, None)], (layers[0].norm, layers[1].norm)


def rotate(x: Tensor, dimensions: int) -> Tensor:
    """Su et al. 2021: turn the pairs (i, i + d/2) of the first ``dimensions`` by ``position * 10000^(-2i/d)``."""
    angles = torch.arange(x.shape[-2])[:, None] * 1e4 ** (-torch.arange(0, dimensions, 2).double() / dimensions)
    first, second = x[..., : dimensions // 2], x[..., dimensions // 2 : dimensions]
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.cat([*turned, x[..., dimensions:]], -1)


def by_hand(attention: Any, x: Tensor, d: int, kind: str, rotary: int, causal: bool) -> Tensor:
    """softmax(norm(q) norm(k)^T / sqrt(d)) v, from the weights; ``(B, L, width)``."""
    ((wq, bq), (wk, bk), (wv, bv), (wo, bo)), (qn, kn) = weights_of(attention)

    def heads(weight: Tensor, bias: Tensor | None) -> Tensor:
        out = x @ weight.T + (0 if bias is None else bias)
        return out.unflatten(-1, (-1, d)).transpose(1, 2)

    def norm(of: Tensor, weight: Tensor) -> Tensor:
        centred = of - of.mean(-1, keepdim=True) if kind == "layer" else of
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    q, k, v = norm(heads(wq, bq), qn.weight), norm(heads(wk, bk), kn.weight), heads(wv, bv)
    if rotary:
        q, k = rotate(q, rotary), rotate(k, rotary)
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) / d**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return out @ wo.T + (0 if bo is None else bo)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_the_formula(
    tiny: Any, tokens: Tensor, family: str, implementation: str, kind: Any
) -> None:
    model = tiny(family, implementation, scale=3).double()
    _, replaced = qk_norm(model, norm=kind)
    assert len(replaced) == (2 if family in ("gpt2", "neox") else 4)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".norm." in name or "_norm." in name:
            parameter.data.copy_(1 + torch.rand(parameter.shape, generator=generator))
    seen: dict[Any, tuple[Tensor, Tensor]] = {}

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen[module] = (args[0] if args else kwargs["hidden_states"], output[0])

    for attention in attentions_of(model):
        attention.register_forward_hook(note, with_kwargs=True)
    model(tokens)
    assert len(seen) == 2
    for attention, (inputs, output) in seen.items():
        rotary = {"llama": 8, "neox": 2}.get(family, 0)
        expected = by_hand(attention, inputs, 8, kind, rotary, causal="bert" not in family)
        # transformers computes rotations, and with "eager" softmax, in float32.
        torch.testing.assert_close(output, expected, rtol=0, atol=2e-6 if implementation == "eager" else 1e-7)


def test_with_llama_it_is_qwen3(tiny: Any, tokens: Tensor) -> None:
    """The same weights in another implementation, which has norms of its own."""
    llama, qwen = tiny("llama", rms_norm_eps=1e-6).eval(), tiny("qwen3", rms_norm_eps=1e-6).eval()
    qk_norm(llama)
    renamed = {}
    for name, value in llama.state_dict().items():
        renamed[name.replace("q_proj.norm", "q_norm").replace("k_proj.norm", "k_norm")] = value + ("norm" in name)
    llama.load_state_dict({**llama.state_dict(), **{
        name: value + 1 for name, value in llama.state_dict().items() if "norm" in name
    }})  # fmt: skip
    qwen.load_state_dict(renamed)
    torch.testing.assert_close(llama(tokens).logits, qwen(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_bounded_however_large_the_weights(tiny: Any, tokens: Tensor, family: str) -> None:
    model = tiny(family).eval()
    qk_norm(model)
    for attention in attentions_of(model):
        for name, parameter in attention.named_parameters():
            if "norm" not in name:
                parameter.data.mul_(1e3)
    scores = []

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, scaling: float, **kwargs: Any
    ) -> Any:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores.append((query @ key.transpose(-1, -2) * scaling).abs().max().item())
        return torch.zeros_like(query).transpose(1, 2), None

    import transformers

    transformers.AttentionInterface.register("record", record)
    model.set_attn_implementation("record")
    model(tokens)
    assert len(scores) == 2 and max(scores) <= 8**0.5 * 1.0001
    assert max(scores) > 0.5


def test_heads_are_normalised_one_by_one_in_their_dtype() -> None:
    projected = torch.randn(2, 3, 12).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of inputs and weights of several dtypes, for which it has slower code
        out = normalize_heads(projected, nn.RMSNorm(4, eps=1e-6))
    assert out.dtype == torch.bfloat16 and out.shape == (2, 3, 12)
    torch.testing.assert_close(
        out.float().unflatten(-1, (3, 4)).pow(2).mean(-1), torch.ones(2, 3, 3), rtol=0.02, atol=0
    )


# --- surgery


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_weights_stay_and_norms_are_new(tiny: Any, family: str) -> None:
    model = tiny(family)
    before = dict(model.state_dict(keep_vars=True))
    _, replaced = qk_norm(model)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value for name, value in before.items())
    new = after.keys() - before.keys()
    assert len(new) == 4 and all(name.endswith("norm.weight") for name in new)
    assert all(torch.equal(after[name], torch.ones(after[name].shape)) for name in new)
    assert all(isinstance(each.new, type(each.old)) for each in replaced)


def test_cross_attention_is_normalised_too() -> None:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "bos_token_id": 0, "eos_token_id": 0}
    gpt2, replaced = qk_norm(GPT2Model(GPT2Config(**sizes, add_cross_attention=True)))
    assert sorted(each.name for each in replaced) == [
        "h.0.attn.c_attn", "h.0.crossattention.c_attn", "h.0.crossattention.q_attn",
    ]  # fmt: skip
    x, other = torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    cross = gpt2.h[0].crossattention
    assert not hasattr(cross.c_attn, "q_norm")  # which would be a parameter without a gradient
    q = cross.q_attn(x).unflatten(-1, (2, 4))
    k, v = cross.c_attn(other).chunk(2, -1)
    for part in (q, k.unflatten(-1, (2, 4))):
        torch.testing.assert_close(part.pow(2).mean(-1), torch.ones(part.shape[:-1]), rtol=1e-2, atol=0)
    assert torch.equal(v, nn.functional.linear(other, cross.c_attn.weight.T, cross.c_attn.bias).chunk(2, -1)[1])
    gpt2(inputs_embeds=x, encoder_hidden_states=other)
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 16}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    bart = BartModel(BartConfig(**sizes, **special, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8))
    assert len(qk_norm(bart)[1]) == 6


def test_models_are_copied_and_pickled(tiny: Any, tokens: Tensor) -> None:
    for family in ("gpt2", "llama"):
        model, _ = qk_norm(tiny(family))
        expected = model(tokens).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(tokens).logits, expected)
            assert repr(other) == repr(model) and "RMSNorm" in repr(model)


def test_an_optimizer_is_updated(tiny: Any) -> None:
    model = tiny("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_optimizer(optimizer, qk_norm(model)[1])
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())


@pytest.mark.filterwarnings("ignore:.* was in eval mode")
def test_a_trainer_trains_saves_and_loads_the_norms(tiny: Any, tokens: Tensor) -> None:
    def make() -> hocket.Trainer:
        data = [{"input_ids": tokens, "labels": tokens}] * 3
        return hocket.Trainer(
            model=tiny("llama"),
            train_data=data,
            optimizer="adamw(lr=0.01)",
            duration="2ep",
            device="cpu",
            algorithms=["qk-norm"],
        )

    trainer = make()
    trainer.fit("1ep")
    norms = {name: value for name, value in trainer.model_state_dict().items() if "proj.norm" in name}
    assert len(norms) == 4 and all(not torch.equal(value, torch.ones(8)) for value in norms.values())
    other = make()
    other.load_state_dict(trainer.state_dict())
    trainer.fit(), other.fit()
    theirs = other.model_state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in trainer.model_state_dict().items())


def test_the_plan_names_each_projection(tiny: Any) -> None:
    assert QKNorm().touches(tiny("neox")) == [
        f"gpt_neox.layers.{layer}.attention.query_key_value: FusedNorm over 8 dimensions" for layer in range(2)
    ]
    assert QKNorm().touches(tiny("llama"))[0] == "model.layers.0.self_attn.q_proj: HeadNorm over 8 dimensions"


def test_caches_hold_normalised_keys(tiny: Any) -> None:
    for family in ("gpt2", "llama", "neox", "opt"):
        model, _ = qk_norm(tiny(family).eval())
        ids = torch.randint(5, 61, (1, 4), generator=torch.Generator().manual_seed(2))
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 60}
        cached, again = (model.generate(ids, **settings, use_cache=use) for use in (True, False))
        assert torch.equal(cached, again)


# --- warnings and errors


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_second_time_changes_nothing(tiny: Any, family: str) -> None:
    model, _ = qk_norm(tiny(family))
    with pytest.warns(hocket.NoEffectWarning, match=r"already applied to this .* in [24] modules"):
        assert qk_norm(model)[1] == []
    assert QKNorm().touches(model) == []


def test_models_with_norms_of_their_own_are_left_alone(tiny: Any) -> None:
    with pytest.warns(hocket.NoEffectWarning, match=r"Qwen3.* normalises queries and keys already: .*q_norm\. Remove"):
        assert qk_norm(tiny("qwen3"))[1] == []


def test_other_models_are_left_alone() -> None:
    with pytest.warns(hocket.NoEffectWarning, match=r"no attention that it knows.*GPT-NeoX\. Remove qk-norm"):
        qk_norm(nn.Sequential(nn.MultiheadAttention(8, 2)))
    model = T5Model(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert qk_norm(model)[1] == []


def test_projections_with_other_features_are_refused(tiny: Any) -> None:
    model = tiny("llama")
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 64)
    with pytest.raises(ValueError, match=r"4 heads of 8 from model\.layers\.1\.self_attn\.q_proj.* has 64 features"):
        qk_norm(model)
    assert not hasattr(model.model.layers[0].self_attn.q_proj, "norm")


def test_the_norm_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match="'rms' or 'layer'"):
        QKNorm("batch")  # type: ignore[arg-type]


def test_models_without_storage_are_refused(tiny: Any) -> None:
    model = tiny("gpt2").to("meta")
    with pytest.raises(
        ValueError, match=r"qk_norm was given GPT2LMHeadModel, whose .*wte.weight is on the meta .*to_empty"
    ):
        qk_norm(model)
    assert not any("norm." in name or "gate" in name for name in model.state_dict())
