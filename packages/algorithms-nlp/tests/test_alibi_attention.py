"""The attention that models compute after ALiBi, against softmax(Q K^T / sqrt(d) + bias) spelt out here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface, DynamicCache, StaticCache

from hocket_nlp.functional import alibi, alibi_slopes
from hocket_nlp.linear_bias import biased_mask

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


def explicit(module: torch.nn.Module, hidden: Tensor, slopes: list[float], causal: bool, visible: Tensor) -> Tensor:
    """One attention layer in plain loops over heads and positions: ``(B, L, d)``, before the output projection."""
    batch, length, width = hidden.shape
    size = width // len(slopes)
    if causal:  # GPT-2
        q, k, v = (hidden @ module.c_attn.weight + module.c_attn.bias).split(width, dim=-1)
    else:
        q, k, v = (getattr(module, name)(hidden) for name in ("query", "key", "value"))
    out = torch.zeros(batch, length, width)
    for b in range(batch):
        for h, slope in enumerate(slopes):
            part = slice(h * size, (h + 1) * size)
            for i in range(length):
                keys = [j for j in range(length) if visible[b, j] and (not causal or j <= i)]
                if not keys:
                    continue
                scores = [float(q[b, i, part] @ k[b, j, part]) / math.sqrt(size) - slope * abs(i - j) for j in keys]
                weights = torch.tensor(scores).softmax(0)
                out[b, i, part] = sum(w * v[b, j, part] for w, j in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize("heads", [3, 6, 8])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_every_layer_computes_the_formula(build, family, implementation, heads, padding) -> None:
    model, _ = alibi(build(family, implementation, heads), 40)
    tokens = torch.randint(5, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    visible = torch.ones_like(tokens)
    if padding != "none":
        visible[1, slice(4, 7) if padding == "right" else slice(0, 3)] = 0
    layers = [
        m for m in model.modules() if type(m).__name__ in ("GPT2Attention", "BertSelfAttention", "RobertaSelfAttention")
    ]
    seen: list[tuple[torch.nn.Module, Tensor, Tensor]] = []
    for layer in layers:
        layer.register_forward_hook(lambda m, args, out: seen.append((m, args[0], out[0])))
    with torch.no_grad():
        model(tokens, attention_mask=None if padding == "none" else visible)
        assert [module for module, _, _ in seen] == layers
        for module, hidden, got in seen:
            want = explicit(module, hidden, SLOPES[heads], family == "gpt2", visible)
            if family == "gpt2":
                want = module.c_proj(want)
            rows = visible.bool()  # what a padding token attends to is nobody's business
            torch.testing.assert_close(got[rows], want[rows], rtol=1e-4, atol=1e-4)
            assert got.isfinite().all()


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
        want = layer.c_proj(explicit(layer, hidden, SLOPES[8], True, torch.ones(1, 5)))
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
    model, _ = alibi(build(family, implementation), 40)
    pad = torch.full((2, 5), model.config.pad_token_id)
    padded = torch.cat([pad, tokens] if side == "left" else [tokens, pad], dim=1)
    visible = (padded != model.config.pad_token_id).long()
    with torch.no_grad():
        plain = model(tokens).logits
        logits = model(padded, attention_mask=visible).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:, 5:] if side == "left" else logits[:, :10], plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bool", "float", "float per head"])
def test_masks_that_users_make_get_the_bias_too(build, family, implementation, tokens, kind) -> None:
    model, _ = alibi(build(family, implementation), 40)
    visible = torch.ones(2, 1, 10, 10, dtype=torch.bool)
    visible[1, ..., 7:] = False
    if family == "gpt2":
        visible = visible.tril()
    if implementation == "eager" or kind != "bool":
        visible = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    if kind == "float per head":
        visible = visible.expand(-1, 6, -1, -1)
    padding = torch.ones(2, 10, dtype=torch.long)
    padding[1, 7:] = 0
    with torch.no_grad():
        got, want = model(tokens, attention_mask=visible).logits, model(tokens, attention_mask=padding).logits
    torch.testing.assert_close(got[padding.bool()], want[padding.bool()], rtol=1e-4, atol=1e-4)


def test_packed_sequences_stay_apart(build, implementation, tokens) -> None:
    model, _ = alibi(build("gpt2", implementation), 40)
    positions = torch.arange(10).repeat(2)[None]
    with torch.no_grad():
        packed = model(tokens.reshape(1, 20), position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed.reshape(2, 10, -1), model(tokens).logits, rtol=1e-4, atol=1e-4)


# --- caches and generation


@pytest.mark.parametrize("static", [False, True])
def test_key_value_cache_in_pieces_gives_the_whole(build, implementation, tokens, static) -> None:
    model, _ = alibi(build("gpt2", implementation), 40)
    cache = StaticCache(config=model.config, max_cache_len=24) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [
            model(piece, past_key_values=cache, use_cache=True).logits for piece in tokens.split([4, 1, 3, 1, 1], 1)
        ]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_masks_that_users_make_know_of_the_cache(build, implementation, tokens) -> None:
    model, _ = alibi(build("gpt2", implementation), 40)
    cache = DynamicCache(config=model.config)
    mask = torch.zeros(2, 1, 4, 10).masked_fill(torch.ones(10, 10).triu(1)[6:].bool(), torch.finfo(torch.float32).min)
    with torch.no_grad():
        model(tokens[:, :6], past_key_values=cache, use_cache=True)
        got = model(tokens[:, 6:], past_key_values=cache, use_cache=True, attention_mask=mask).logits
        torch.testing.assert_close(got, model(tokens).logits[:, 6:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generate_far_beyond_the_trained_length(build, implementation, tokens, cache) -> None:
    model, _ = alibi(build("gpt2", implementation), 80)
    model.generation_config.eos_token_id = None
    options = {"use_cache": False} if cache is None else {"cache_implementation": cache if cache == "static" else None}
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    with torch.no_grad():
        got = model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=70, disable_compile=True, **options
        )
        assert got.shape == (2, 80)
        want, seen = tokens, mask
        for _ in range(70):
            best = model(want, attention_mask=seen, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            want, seen = torch.cat([want, best], 1), torch.cat([seen, torch.ones_like(best)], 1)
    assert torch.equal(got, want)


def test_longer_sequences_than_were_trained(build, family, implementation) -> None:
    tokens = torch.randint(5, 61, (1, 200), generator=torch.Generator().manual_seed(3))
    model = build(family, implementation)
    with torch.no_grad():
        with pytest.raises((IndexError, RuntimeError)):
            model(tokens)
        model, _ = alibi(model, 200)
        logits = model(tokens).logits
        assert logits.isfinite().all()
        if family == "gpt2":  # what was seen before is not changed by what follows
            torch.testing.assert_close(logits[:, :50], model(tokens[:, :50]).logits, rtol=1e-4, atol=1e-4)


# --- how it is trained


def gradients(model: torch.nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # its successor is not in 5.0
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(build, family, implementation, tokens, reentrant) -> None:
    off = (
        {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
        if family == "gpt2"
        else {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
    )
    model, _ = alibi(build(family, implementation, **off), 40)
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


def test_compiles_into_one_graph(build, tokens) -> None:
    model, _ = alibi(build("gpt2"), 40)
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
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens)
    shared, padded, low = masks  # one for both layers
    assert shared.shape == (1, 9, 300, 300) and shared.dtype == torch.float32
    assert shared[0, 3, 0, 1] == torch.finfo(torch.float32).min
    assert padded.shape == (3, 9, 300, 300) and torch.equal(padded[2], shared[0])
    assert low.dtype == torch.bfloat16
    # Slopes of 8 heads are powers of two and distances up to 256 whole numbers: exact even in bfloat16.
    assert torch.equal(low[0, :8, 299, 43:].float(), shared[0, :8, 299, 43:])
