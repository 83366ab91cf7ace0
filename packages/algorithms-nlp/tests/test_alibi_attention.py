"""The attention that models compute after ALiBi, against softmax(Q K^T / sqrt(d) + bias) spelt out here."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface, DynamicCache, StaticCache

from hocket_nlp.functional import alibi, alibi_slopes
from hocket_nlp.linear_bias import biased_mask, eager_attention

#: Of the tiny models of conftest.py.
LEARNED, TRAINED, WINDOW = ("gpt2", "bert", "roberta", "opt"), 32, 5

# Press et al. 2022, section 3, for 8 heads; the others from the code that the authors published.
SLOPES = {
    1: [1 / 256],
    2: [1 / 16, 1 / 256],
    3: [1 / 16, 1 / 256, 1 / 4],
    6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [*(2.0**-i for i in range(1, 9)), *(2.0 ** -(i + 0.5) for i in range(4))],
    16: [2.0 ** (-i / 2) for i in range(1, 17)],
}


@pytest.mark.parametrize("heads", SLOPES)
def test_slopes_are_those_of_the_paper(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor(SLOPES[heads]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", range(1, 70))
def test_slopes_of_any_number_of_heads_are_distinct_and_extend_a_power_of_two(heads: int) -> None:
    slopes = alibi_slopes(heads)
    base = 2 ** int(math.log2(heads))
    assert len(set(slopes.tolist())) == len(slopes) == heads
    want = torch.cat([alibi_slopes(base), alibi_slopes(2 * base)[0::2][: heads - base]])
    torch.testing.assert_close(slopes, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [0, -4, 8.0])
def test_slopes_refuse_what_is_no_number_of_heads(heads: int) -> None:
    with pytest.raises(ValueError, match="number of attention heads"):
        alibi_slopes(heads)


def projections(family: str, module: torch.nn.Module, hidden: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of a layer, ``(B, L, heads, 4)``: those that heads share are repeated."""
    batch, length, width = hidden.shape

    def split(tensor: Tensor) -> Tensor:
        return tensor.reshape(batch, length, -1, 4)

    if family == "gpt2":
        q, k, v = map(split, (hidden @ module.c_attn.weight + module.c_attn.bias).split(width, dim=-1))
    elif family == "neox":  # queries, keys and values of a head are neighbours
        q, k, v = module.query_key_value(hidden).reshape(batch, length, heads, 3, 4).unbind(3)
    elif "bert" in family:
        q, k, v = (split(getattr(module, name)(hidden)) for name in ("query", "key", "value"))
    else:
        q, k, v = (split(getattr(module, name)(hidden)) for name in ("q_proj", "k_proj", "v_proj"))
    if family == "qwen3":
        q, k = module.q_norm(q), module.k_norm(k)
    shared = [head // (heads // k.shape[2]) for head in range(heads)]
    return q, k[:, :, shared], v[:, :, shared]


def output(family: str, module: torch.nn.Module, attended: Tensor) -> Tensor:
    """The output projection of a layer."""
    name = {"gpt2": "c_proj", "neox": "dense", "opt": "out_proj"}.get(family, "o_proj")
    return attended if "bert" in family else getattr(module, name)(attended)


def explicit(
    family: str, module: torch.nn.Module, hidden: Tensor, slopes: list[float], visible: Tensor, window: int = 1000
) -> Tensor:
    """One attention layer in plain loops over heads and positions: ``(B, L, d)``."""
    q, k, v = projections(family, module, hidden, len(slopes))
    out = torch.zeros_like(q)
    for b, h, i in itertools.product(range(q.shape[0]), range(len(slopes)), range(q.shape[1])):
        causal = "bert" not in family
        keys = [j for j in range(q.shape[1]) if visible[b, j] and (not causal or i - window < j <= i)]
        if keys:
            scores = [float(q[b, i, h] @ k[b, j, h]) / math.sqrt(4) - slopes[h] * abs(i - j) for j in keys]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0).to(v.dtype)
            out[b, i, h] = weights @ v[b, keys, h]
    return output(family, module, out.flatten(2))


#: Families whose models transformers lets use FlexAttention.
FLEX = {"bert", "roberta", "opt", "neox", "llama", "mistral", "qwen3"}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_every_layer_computes_the_formula_in_float64(build, family, attention, padding) -> None:
    if attention == "flex_attention" and family not in FLEX:
        pytest.skip("transformers refuses it")
    heads = {"none": 8, "right": 6, "left": 3}[padding]
    model, _ = alibi(build(family, attention, heads).double(), 40)
    tokens = torch.randint(5, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    visible = torch.ones_like(tokens)
    if padding != "none":
        visible[1, slice(4, 7) if padding == "right" else slice(0, 3)] = 0
    layers = [m for m in model.modules() if type(m).__name__.endswith(("SelfAttention", "Attention"))]
    layers = [m for m in layers if type(m).__name__ not in ("BertAttention", "RobertaAttention")]
    assert len(layers) == 2
    seen: list[tuple[torch.nn.Module, Tensor, Tensor]] = []

    def record(module: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: Any) -> None:
        seen.append((module, args[0] if args else kwargs["hidden_states"], out[0]))

    for layer in layers:
        layer.register_forward_hook(record, with_kwargs=True)
    # Unfused: compiling takes seconds.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(tokens, attention_mask=None if padding == "none" else visible)
        assert [module for module, _, _ in seen] == layers
        for module, hidden, got in seen:
            assert hidden.dtype == got.dtype == torch.float64
            window = WINDOW if family == "mistral" else 1000
            want = explicit(family, module, hidden, SLOPES[heads], visible, window)
            rows = visible.bool()  # what a padding token attends to is nobody's business
            torch.testing.assert_close(got[rows], want[rows], rtol=1e-5, atol=1e-5)
            assert got.isfinite().all()


def test_a_soft_cap_comes_before_the_bias(build) -> None:
    model, _ = alibi(build("llama", "eager"), 40)
    generator = torch.Generator().manual_seed(0)
    query, key = (10 * torch.randn(1, heads, 5, 4, generator=generator, dtype=torch.float64) for heads in (6, 2))
    _, got = eager_attention(model.model.layers[0].self_attn, query, key, key, None, scaling=0.5, softcap=3.0)
    distance = torch.arange(5)[:, None] - torch.arange(5)
    scores = 3 * torch.tanh(query @ key.repeat_interleave(3, 1).mT * 0.5 / 3)
    scores = scores - torch.tensor(SLOPES[6], dtype=torch.float64)[:, None, None] * distance
    torch.testing.assert_close(got, scores.masked_fill(distance < 0, -math.inf).softmax(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_windows_shorter_than_the_trial(build, tokens, window) -> None:
    model, _ = alibi(build("mistral", sliding_window=window).double(), 40)
    other = tokens.clone()
    other[:, 0] = 5 + (other[:, 0] + 7) % 50  # two layers see as far back as two windows
    with torch.no_grad():
        same = (model(other).logits - model(tokens).logits).abs().amax((0, 2)) == 0
    assert same.tolist() == [position > 2 * (window - 1) for position in range(10)]


@pytest.mark.parametrize("change", ["order", "positions", "offset"])
def test_order_matters_and_positions_do_not(build, family, tokens, change) -> None:
    model, _ = alibi(build(family).double(), 40)
    order, positions = torch.arange(10), torch.arange(10)
    if change == "order":
        order[[3, 7]] = order[[7, 3]]
    else:
        positions = positions + 7 if change == "offset" else positions.flip(0)
    mask = torch.ones_like(tokens)  # without it, positions that restart would mean packed sequences
    with torch.no_grad():
        want = model(tokens, attention_mask=mask).logits[:, -1]
        got = model(tokens[:, order], attention_mask=mask, position_ids=positions.expand(2, -1)).logits[:, -1]
    assert torch.equal(got, want) == (change != "order")
    assert change != "order" or (got - want).abs().max() > 1e-3


def test_bias_is_not_scaled_with_the_scores(build, implementation) -> None:
    model, _ = alibi(
        build("gpt2", implementation, 8, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False), 40
    )
    layer, hidden = model.transformer.h[1].attn, torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        got, _ = layer(hidden)
        layer.c_attn.weight[:, :32] *= (
            math.sqrt(4) / 2
        )  # the explicit form divides by sqrt(4), this layer by its number, 2
        want = explicit("gpt2", layer, hidden, SLOPES[8], torch.ones(1, 5))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_two_implementations_agree_and_eager_returns_weights(build, family, tokens) -> None:
    sdpa, _ = alibi(build(family, "sdpa"), 40)
    eager, _ = alibi(build(family, "eager"), 40)
    with torch.no_grad():
        out = eager(tokens, output_attentions=True)
        torch.testing.assert_close(out.logits, sdpa(tokens).logits, rtol=1e-4, atol=1e-4)
    assert len(out.attentions) == 2
    for weights in out.attentions:
        assert weights.shape == (2, 6, 10, 10)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 10))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(build, family, implementation, tokens, side) -> None:
    model, _ = alibi(build(family, implementation).double(), 40)
    pad = torch.full((2, 5), model.config.pad_token_id)
    padded = torch.cat([pad, tokens] if side == "left" else [tokens, pad], dim=1)
    visible = (padded != model.config.pad_token_id).long()
    with torch.no_grad():
        plain = model(tokens).logits
        logits = model(padded, attention_mask=visible).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:, 5:] if side == "left" else logits[:, :10], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float", "float per head"])
def test_masks_that_users_make_get_the_bias_too(build, family, implementation, tokens, kind) -> None:
    model, _ = alibi(build(family, implementation), 40)
    visible = torch.ones(2, 1, 10, 10, dtype=torch.bool)
    visible[1, ..., 7:] = False
    if "bert" not in family:
        visible = visible.tril()
    if family == "mistral":
        visible = visible.triu(1 - WINDOW)
    if implementation == "eager" or kind != "bool":
        visible = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    if kind == "float per head":
        visible = visible.expand(-1, 6, -1, -1)
    padding = torch.ones(2, 10, dtype=torch.long)
    padding[1, 7:] = 0
    with torch.no_grad():
        got, want = model(tokens, attention_mask=visible).logits, model(tokens, attention_mask=padding).logits
    torch.testing.assert_close(got[padding.bool()], want[padding.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rotary_or_not", ["gpt2", "llama", "mistral"])
def test_packed_sequences_stay_apart(build, rotary_or_not, implementation, tokens) -> None:
    model, _ = alibi(build(rotary_or_not, implementation), 40)
    positions = torch.arange(10).repeat(2)[None]
    with torch.no_grad():
        packed = model(tokens.reshape(1, 20), position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed.reshape(2, 10, -1), model(tokens).logits, rtol=1e-4, atol=1e-4)


# --- caches and generation


@pytest.mark.parametrize("static", [False, True])
def test_key_value_cache_in_pieces_gives_the_whole(build, causal, implementation, tokens, static) -> None:
    model, _ = alibi(build(causal, implementation).double(), 40)
    cache = StaticCache(config=model.config, max_cache_len=24) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [
            model(piece, past_key_values=cache, use_cache=True).logits for piece in tokens.split([4, 1, 3, 1, 1], 1)
        ]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rotary_or_not", ["gpt2", "llama"])
def test_masks_that_users_make_know_of_the_cache(build, rotary_or_not, implementation, tokens) -> None:
    model, _ = alibi(build(rotary_or_not, implementation), 40)
    cache = DynamicCache(config=model.config)
    mask = torch.zeros(2, 1, 4, 10).masked_fill(torch.ones(10, 10).triu(1)[6:].bool(), torch.finfo(torch.float32).min)
    with torch.no_grad():
        model(tokens[:, :6], past_key_values=cache, use_cache=True)
        got = model(tokens[:, 6:], past_key_values=cache, use_cache=True, attention_mask=mask).logits
        torch.testing.assert_close(got, model(tokens).logits[:, 6:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generate_beyond_the_trained_length(build, causal, tokens, cache) -> None:
    model, _ = alibi(build(causal), 80)
    model.generation_config.eos_token_id = None
    options = {"use_cache": False} if cache is None else {"cache_implementation": cache if cache == "static" else None}
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    with torch.no_grad():
        got = model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=30, disable_compile=True, **options
        )
        assert got.shape == (2, 40) and TRAINED < 40
        want, seen = tokens, mask
        for _ in range(30):
            best = model(want, attention_mask=seen, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            want, seen = torch.cat([want, best], 1), torch.cat([seen, torch.ones_like(best)], 1)
    assert torch.equal(got, want)


def test_longer_sequences_than_were_trained(build, family, implementation) -> None:
    tokens = torch.randint(5, 61, (1, 200), generator=torch.Generator().manual_seed(3))
    model = build(family, implementation)
    with torch.no_grad():
        if family in LEARNED:
            with pytest.raises((IndexError, RuntimeError)):
                model(tokens)
        model, _ = alibi(model, 200)
        logits = model(tokens).logits
        assert logits.isfinite().all()
        if "bert" not in family:  # what was seen before is not changed by what follows
            torch.testing.assert_close(logits[:, :50], model(tokens[:, :50]).logits, rtol=1e-4, atol=1e-4)


# --- how it is trained


def gradients(model: torch.nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # its successor is not in 5.0
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(build, family, implementation, tokens, reentrant) -> None:
    model, _ = alibi(build(family, implementation), 40)
    want = gradients(model.train(), tokens)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    got = gradients(model, tokens)
    assert want.keys() == got.keys() and any(gradient.any() for gradient in want.values())
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_bfloat16_autocast(build, family, implementation, tokens) -> None:
    model, _ = alibi(build(family, implementation), 40)
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    with torch.no_grad():
        want = model(tokens, attention_mask=mask).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens, attention_mask=mask, labels=tokens)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert (out.logits.float() - want)[mask.bool()].abs().mean() < 0.02 * want.abs().mean()


def test_attention_dropout_acts_in_training_only(build, implementation, tokens) -> None:
    model, _ = alibi(build("gpt2", implementation, attn_pdrop=0.5, embd_pdrop=0, resid_pdrop=0), 40)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, model(tokens).logits)
        model.train()
        assert not torch.equal(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("rotary_or_not", ["gpt2", pytest.param("opt", marks=pytest.mark.long), "llama"])
def test_compiles_into_one_graph(build, rotary_or_not, tokens) -> None:
    model, _ = alibi(build(rotary_or_not), 40)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


# --- the mask


def test_mask_is_shared_over_sequences_without_padding_and_has_the_dtype_of_the_attention(build, monkeypatch) -> None:
    model, _ = alibi(build("gpt2", heads=8), 300)
    masks = []
    recorder = lambda **arguments: masks.append(biased_mask(**arguments)) or masks[-1]  # noqa: E731
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "hocket_alibi_sdpa", recorder)
    tokens = torch.full((3, 300), 7)
    with torch.no_grad():
        model(tokens)
        model(tokens, attention_mask=torch.ones_like(tokens))
        mask = torch.ones_like(tokens)
        mask[1, :9] = 0
        model(tokens, attention_mask=mask)
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens)
    shared, ones, padded, low = masks  # one for both layers
    assert shared.shape == (1, 9, 300, 300) and shared.dtype == torch.float32
    assert shared.isfinite().all() and (shared[0, :8, 0, 1] < -1e35).all()
    assert torch.equal(ones, shared)
    assert padded.shape == (3, 9, 300, 300) and torch.equal(padded[2], shared[0])
    assert low.dtype == torch.bfloat16
    with torch.no_grad():
        model.half()(tokens[:, :5])
    assert masks[-1].dtype == torch.float16 and (masks[-1][0, :8, 0, 1] == torch.finfo(torch.float16).min).all()
    # Slopes of 8 heads are powers of two and distances up to 256 whole numbers: exact even in bfloat16.
    assert torch.equal(low[0, :8, 299, 43:].float(), shared[0, :8, 299, 43:])


def test_mask_of_a_cache_that_forgot_its_first_keys_counts_from_the_query(build) -> None:
    config = build("gpt2", heads=8).config
    mask = biased_mask(config=config, batch_size=1, q_length=2, q_offset=99, kv_length=5, kv_offset=96)
    assert (mask[0, :8, 0, 4] < -1e35).all()  # key 100 after query 99
    assert mask[0, 0].tolist()[1] == [-2.0, -1.5, -1.0, -0.5, 0.0]
    assert mask[0, 7, 0, :4].tolist() == [-3 / 256, -2 / 256, -1 / 256, 0.0]
