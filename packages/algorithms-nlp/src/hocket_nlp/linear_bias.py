"""Attention and mask functions with linear biases, which transformers calls by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: Attention implementation of transformers -> its replacement with linear biases.
IMPLEMENTATIONS = {"sdpa": "hocket_alibi_sdpa", "eager": "hocket_alibi_eager"}


def alibi_slopes(heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the slope of each head: the amount that attention scores decrease per token of distance.

    For a power of two the geometric sequence 2^(-8/heads), 2^(-16/heads), ..., 2^-8 (Press et al. 2022, section 3,
    arXiv 2108.12409). Otherwise that of the largest power of two below, followed by every other slope, from the first
    on, of twice that power, as in the code that the authors published.

    Args:
        heads: the number of attention heads, at least 1.
        device: where the result is computed.

    Returns:
        float32 of shape ``(heads,)``, all between 0 and 1.

    Raises:
        ValueError: ``heads`` is not a positive integer.

    Example:
        >>> from hocket_nlp.functional import alibi_slopes
        >>> alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"A model has a whole, positive number of attention heads, not {heads!r}.")
    base = 1 << (heads.bit_length() - 1)
    exponents = torch.arange(1, base + 1, dtype=torch.float32, device=device) * (8 / base)
    between = torch.arange(1, 2 * (heads - base) + 1, 2, dtype=torch.float32, device=device) * (4 / base)
    return torch.exp2(-torch.cat([exponents, between]))


def register() -> None:
    """Register the implementations with transformers under the names in ``IMPLEMENTATIONS``.

    Raises ImportError for a transformers older than 5.
    """
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ImportError(
            f"ALiBi needs transformers 5 or later, and {transformers.__version__} is installed: transformers 4 ignores "
            "custom attention functions in some models without a warning. Type: pip install 'transformers>=5'."
        )
    for name, function in (("sdpa", sdpa_attention), ("eager", eager_attention)):
        transformers.AttentionInterface.register(IMPLEMENTATIONS[name], function)
        transformers.AttentionMaskInterface.register(IMPLEMENTATIONS[name], biased_mask)


def biased_mask(*, config: Any, dtype: torch.dtype = torch.float32, kv_offset: int = 0, **kwargs: Any) -> Tensor:
    """Return the mask of a forward pass, made once and shared by all layers: additive, with the biases included.

    Query i and key j of head h get ``-slope_h * |i - j|``, or the lowest number of the dtype where the query may not
    see the key. The arguments are those of transformers' own mask functions: ``q_length`` and ``q_offset`` (or in 5.0
    ``cache_position``), ``kv_length``, ``mask_function``, ``attention_mask`` and others. Skipping the mask is never
    allowed, since the bias is always needed.

    Returns:
        ``(B, heads + 1, Q, K)``, or ``(1, heads + 1, Q, K)`` where all sequences see the same, in the dtype in which
        attention computes. The last head is empty and marks the mask as ours: transformers passes masks made by users on
        without calling this function, and their biases must still be added.
    """
    # Import from submodules: torch 2.9 cannot compile an import from a lazy module such as transformers.
    from transformers.masking_utils import AttentionMaskInterface

    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    visible: Tensor = AttentionMaskInterface()["sdpa"](config=config, dtype=dtype, kv_offset=kv_offset, **kwargs)
    if visible.stride(0) == 0:
        visible = visible[:1]
    device = visible.device
    if torch.is_autocast_enabled(device.type):
        # Autocast would otherwise convert the mask again in every layer, and keep each copy for the backward pass.
        dtype = torch.get_autocast_dtype(device.type)
    queries = kwargs.get("cache_position")
    if queries is None:
        queries = torch.arange(visible.shape[2], device=device) + kwargs.get("q_offset", 0)
    keys = torch.arange(visible.shape[3], device=device) + kv_offset
    slopes = nn.functional.pad(alibi_slopes(config.num_attention_heads, device=device), (0, 1))
    return torch.where(visible, _biases(slopes, queries, keys).to(dtype), torch.finfo(dtype).min)


def sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute transformers' ``sdpa`` attention with linear biases, from ``(B, heads, L, d)`` to ``(B, Q, heads, d)``."""
    from transformers.modeling_utils import AttentionInterface

    mask = _with_biases(module, query, key, attention_mask, kwargs)
    output, weights = AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)
    return output, weights


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention explicitly, with linear biases; also return the weights ``(B, heads, Q, K)``."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = (scores + _with_biases(module, query, key, attention_mask, kwargs)).softmax(-1).to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _with_biases(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """Return the additive mask ``(B or 1, heads, Q, K)`` in the query's dtype, from our mask, the user's, or none."""
    heads = query.shape[1]
    if heads != module.config.num_attention_heads or kwargs.get("cache") is not None:
        raise NotImplementedError(
            f"ALiBi was given {heads} of {module.config.num_attention_heads} attention heads"
            f"{' and a paged cache' if kwargs.get('cache') is not None else ''}. It needs layers "
            "that hold all of their heads and all keys in order, for slopes and distances: do not shard attention over heads "
            "(tensor parallelism), and generate with model.generate."
        )
    if mask is not None and mask.shape[1] == heads + 1:
        return mask[:, :heads].to(query.dtype)
    # The queries are the last keys. A static cache may have empty keys after them, and the distance is then too large, by the
    # same amount for all keys of a query: softmax is invariant to that.
    keys = torch.arange(key.shape[2], device=query.device)
    queries = keys[keys.shape[0] - query.shape[2] :]
    biases = _biases(alibi_slopes(heads, device=query.device), queries, keys).to(query.dtype)
    if mask is None and module.is_causal:
        mask = keys <= queries[:, None]
    if mask is None:
        return biases
    return torch.where(mask, biases, torch.finfo(query.dtype).min) if mask.dtype == torch.bool else biases + mask


def _biases(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return ``-slope * |i - j|`` of shape ``(1, heads, Q, K)``, for the positions of queries and keys.

    Softmax would give the same for ``slope * j``, but distances keep nearby keys exact in bfloat16.
    """
    return (slopes[:, None, None] * -(queries[:, None] - keys).abs())[None]
