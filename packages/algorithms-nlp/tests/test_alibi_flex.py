"""FlexAttention with linear biases, against the formula: unfused on a CPU, compiled on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hocket_nlp.flex_bias import flex_attention, score_with_bias
from hocket_nlp.functional import alibi, alibi_slopes


@pytest.fixture
def unfused() -> Iterator[None]:
    """Compiling takes seconds, and a compiler."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        warnings.filterwarnings("ignore", "_compile flag on create_block_mask", DeprecationWarning)
        yield


@pytest.mark.parametrize("causal", [False, True])
def test_scores_get_the_bias_of_their_head_and_distance(causal) -> None:
    score_mod = score_with_bias(torch.tensor([0.5, 0.25]), offset=2, causal=causal)
    at = lambda head, query, key: float(score_mod(torch.tensor(1.0), *map(torch.tensor, (0, head, query, key))))  # noqa: E731
    assert at(0, 1, 3) == 1 and at(0, 1, 0) == 1 - 0.5 * 3 and at(1, 0, 0) == 1 - 0.25 * 2
    assert at(1, 0, 4) == (-float("inf") if causal else 1 - 0.25 * 2)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family_with_flex", ["opt", "neox", "llama", "mistral"])
def test_key_value_cache_in_pieces_gives_the_whole(build, unfused, family_with_flex, tokens, static) -> None:
    model, _ = alibi(build(family_with_flex, "flex_attention").double(), 40)
    plain, _ = alibi(build(family_with_flex, "sdpa").double(), 40)
    cache = StaticCache(config=model.config, max_cache_len=24) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [model(piece, past_key_values=cache, use_cache=True).logits for piece in tokens.split([4, 1, 3, 2], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), plain(tokens).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [6, 8])  # the keys of 4 heads are shared by the kernel, those of 2 are repeated for 6
def test_a_layer_called_without_a_mask_is_causal(build, unfused, heads) -> None:
    model, _ = alibi(build("llama", "flex_attention", heads), 40)
    layer = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, 5, 4, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, layer.config.num_key_value_heads, 7, 4, generator=generator, dtype=torch.float64)
    got, weights = flex_attention(layer, query, key, value, None, scaling=0.3)
    shared = torch.arange(heads) // (heads // key.shape[1])
    distance = torch.arange(2, 7)[:, None] - torch.arange(7)  # the queries are the last of the keys
    scores = query @ key[:, shared].mT * 0.3 - alibi_slopes(heads, dtype=torch.float64)[:, None, None] * distance
    want = scores.masked_fill(distance < 0, -float("inf")).softmax(-1) @ value[:, shared]
    assert weights is None
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dropout": 0.1}, r"cannot apply dropout \(0\.1\) in LlamaAttention: set it to 0 "),
        ({"softcap": 30.0}, r"cannot apply a soft cap \(30\.0\) in LlamaAttention: set it to None "),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(build, unfused, options, said) -> None:
    model, _ = alibi(build("llama", "flex_attention"), 40)
    query = torch.zeros(1, 6, 3, 4)
    with pytest.raises(ValueError, match=said):
        flex_attention(model.model.layers[0].self_attn, query, query, query, None, **options)


def test_dense_masks_are_refused(build, unfused, tokens) -> None:
    model, _ = alibi(build("llama", "flex_attention"), 40)
    with pytest.raises(
        ValueError, match=r"mask of shape \(2, 1, 10, 10\): give the model a mask of shape \(batch, length\)"
    ):
        model(tokens, attention_mask=torch.ones(2, 1, 10, 10, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no kernel for gradients")
def test_the_compiled_kernel_computes_the_same(build) -> None:
    tokens = torch.randint(5, 61, (2, 300), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(tokens)
    mask[1, :100] = 0
    found = []
    for implementation in ("sdpa", "flex_attention"):
        model = build("llama", implementation, 8, hidden_size=256, head_dim=32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(10 if parameter.dim() > 1 else 1)
        model, _ = alibi(model.cuda(), 300)
        loss = model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
        loss.backward()
        found.append((loss.item(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.05, atol=0.02 * found[0][1].abs().max().item())
