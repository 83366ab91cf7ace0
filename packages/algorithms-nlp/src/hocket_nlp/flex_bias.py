"""FlexAttention with linear biases: they are computed from positions in the kernel, and no bias tensor is stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.errors import WrongValue
from hocket_nlp.linear_bias import check_call, slopes_in


def score_with_bias(slopes: Tensor, offset: int, causal: bool) -> Callable[..., Tensor]:
    """Return a ``score_mod`` of FlexAttention that adds ``-slope_h * |i + offset - j|`` to the score of query i and key j.

    Args:
        slopes: of each query head, ``(heads,)``.
        offset: the position of the first query among the keys.
        causal: also hide the keys after the query.
    """

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        biased = score - slopes[head] * distance.abs()
        return torch.where(distance >= 0, biased, -float("inf")) if causal else biased

    return score_mod


def flex_mask(*, config: Any, **kwargs: Any) -> Any:
    """Return the block mask that transformers makes for ``flex_attention``; biases are not in it."""
    from transformers.masking_utils import AttentionMaskInterface

    if isinstance(kwargs.get("q_offset"), Tensor):
        # A static cache counts in place, and the block mask is evaluated only when it has counted the new tokens.
        kwargs["q_offset"] = kwargs["q_offset"].clone()
    return AttentionMaskInterface()["flex_attention"](config=config, **kwargs)


def flex_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute FlexAttention with linear biases, from ``(B, heads, L, d)`` to ``(B, Q, heads, d)``, without a bias tensor.

    Raises:
        ValueError: dropout or a soft cap is asked for, or a mask that is no block mask.
    """
    noted = check_call(module, query, key, kwargs)
    if dropout or softcap is not None:
        what = f"dropout ({dropout})" if dropout else f"a soft cap ({softcap})"
        raise WrongValue(
            f"flex_attention with ALiBi cannot apply {what} in {type(module).__name__}: set it to "
            f"{'0' if dropout else 'None'} in the model's configuration, or call model.set_attn_implementation('eager') "
            "before ALiBi is applied."
        )
    if isinstance(attention_mask, Tensor):
        raise WrongValue(
            f"flex_attention with ALiBi was given a mask of shape {tuple(attention_mask.shape)}: give the model a mask of "
            "shape (batch, length), or a BlockMask, or use the attention implementation 'sdpa'."
        )
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    shared = groups > 1 and heads & (heads - 1) == 0  # torch's kernel shares keys of a power of two of heads only
    if groups > 1 and not shared:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # The queries are the last keys; see linear_bias for why a static cache with empty keys changes nothing.
    offset = key.shape[2] - query.shape[2]
    causal = attention_mask is None and noted.causal
    output = _kernel()(
        query,
        key,
        value,
        score_mod=score_with_bias(slopes_in(query.dtype, heads, query.device), offset, causal),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=shared,
        kernel_options=kwargs.get("kernel_options"),
    )
    return output.transpose(1, 2).contiguous(), None


def _kernel() -> Callable[..., Tensor]:
    """Return the compiled FlexAttention, or inside ``torch.compile`` the plain one, which is compiled with the model."""
    from torch.nn.attention import flex_attention as torchs

    return torchs.flex_attention if torch.compiler.is_compiling() else _compiled()  # type: ignore[return-value]


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention import flex_attention as torchs

    return torch.compile(torchs.flex_attention)
