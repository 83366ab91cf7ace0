"""Attention and mask functions with linear biases, which transformers calls by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.errors import MissingPackage, Unsupported, WrongState, WrongValue

#: Attention implementation of transformers -> its replacement with linear biases.
IMPLEMENTATIONS = {"sdpa": "hocket_alibi_sdpa", "eager": "hocket_alibi_eager", "flex_attention": "hocket_alibi_flex"}


class LayerBias(NamedTuple):
    """What ALiBi notes on an attention module, as its attribute ``hocket_alibi``."""

    heads: int
    causal: bool


def alibi_slopes(heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the slope of each head: the amount that attention scores decrease per token of distance.

    For a power of two the geometric sequence 2^(-8/heads), 2^(-16/heads), ..., 2^-8 (Press et al. 2022, section 3,
    arXiv 2108.12409). Otherwise that of the largest power of two below, followed by every other slope, from the first
    on, of twice that power, as in the code that the authors published.

    Args:
        heads: the number of attention heads, at least 1.
        device: where the result is computed.
        dtype: in which it is computed and returned; with fewer bits than float32, slopes of many heads coincide.

    Returns:
        Shape ``(heads,)``, all between 0 and 1.

    Raises:
        ValueError: ``heads`` is not a positive integer.

    Example:
        >>> from hocket_nlp.functional import alibi_slopes
        >>> alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if not isinstance(heads, int) or heads < 1:
        raise WrongValue(f"A model has a whole, positive number of attention heads, not {heads!r}.")
    base = 1 << (heads.bit_length() - 1)
    exponents = torch.arange(1, base + 1, dtype=dtype, device=device) * (8 / base)
    between = torch.arange(1, 2 * (heads - base) + 1, 2, dtype=dtype, device=device) * (4 / base)
    return torch.exp2(-torch.cat([exponents, between]))


def require_transformers() -> Any:
    """Return the module transformers. Raises ImportError, with what to type, if it is missing or older than 5."""
    try:
        import transformers
    except ImportError as error:
        raise MissingPackage(
            f"ALiBi changes models of transformers, which cannot be imported here ({error}). Type: "
            "pip install 'transformers>=5'."
        ) from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise MissingPackage(
            f"ALiBi needs transformers 5 or later, and {transformers.__version__} is installed: transformers 4 ignores "
            "custom attention functions in some models without a warning. Type: pip install 'transformers>=5'."
        )
    return transformers


def register() -> None:
    """Register the implementations with transformers under the names in ``IMPLEMENTATIONS``.

    Raises ImportError if transformers is missing or older than 5.
    """
    transformers = require_transformers()
    from hocket_nlp.flex_bias import flex_attention, flex_mask

    functions = {
        "sdpa": (sdpa_attention, biased_mask),
        "eager": (eager_attention, biased_mask),
        "flex_attention": (flex_attention, flex_mask),
    }
    for name, (attention, mask) in functions.items():
        transformers.AttentionInterface.register(IMPLEMENTATIONS[name], attention)
        transformers.AttentionMaskInterface.register(IMPLEMENTATIONS[name], mask)


def biased_mask(*, config: Any, dtype: torch.dtype = torch.float32, kv_offset: int = 0, **kwargs: Any) -> Tensor:
    """Return the mask of a forward pass, made once and shared by all layers: additive, with the biases included.

    Query i and key j of head h get ``-slope_h * |i - j|``, or where the query may not see the key about the lowest number
    of the dtype. The arguments are those of transformers' own mask functions: ``q_length`` and ``q_offset`` (or in 5.0
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
    if _hides_nothing(kwargs.get("attention_mask"), kwargs["kv_length"] + kv_offset):
        kwargs["attention_mask"] = None  # one mask for all sequences
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
    slopes = nn.functional.pad(slopes_in(dtype, config.num_attention_heads, device), (0, 1))
    # Hidden keys are put infinitely far away, nearly: one pass over the biases is enough, where `where` would take another.
    far = torch.finfo(slopes.dtype if dtype == torch.float16 else dtype).min
    distance = torch.where(visible, -(queries[:, None] - keys).abs().to(slopes.dtype), far)
    mask = slopes[:, None, None] * distance
    if dtype == torch.float16:  # whose range is so small that a slope times its lowest number would not hide a key
        mask = mask.clamp_(min=torch.finfo(dtype).min)
    return mask.to(dtype)


def _hides_nothing(padding: Tensor | None, length: int) -> bool:
    """Whether a padding mask ``(B, L)`` is all ones, for keys up to a length. False where its values cannot be read."""
    if type(padding) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return padding.shape[-1] >= length and bool(padding.all())


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
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention explicitly, with linear biases; also return the weights ``(B, heads, Q, K)``.

    Keys and values may have fewer heads than queries, each shared by as many query heads. With ``softcap`` c, scores s become
    ``c * tanh(s / c)`` before biases are added.
    """
    mask = _with_biases(module, query, key, attention_mask, kwargs)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = (scores + mask).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def check_call(module: Any, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> LayerBias:
    """Return what ALiBi noted on an attention module. Raises for calls whose biases would be wrong.

    Raises:
        RuntimeError: the module is not one of those that ALiBi has seen.
        NotImplementedError: it holds only some of its heads, or uses what biases cannot be combined with.
    """
    noted: LayerBias | None = getattr(module, "hocket_alibi", None)
    if noted is None:
        raise WrongState(
            f"{type(module).__name__} calls attention with linear biases, and ALiBi has not seen it: it was put into the model "
            "afterwards, or it attends to another sequence. Apply ALiBi again, or give this layer a configuration of its own."
        )
    heads, others = (
        query.shape[1],
        [name for name in ("cache", "s_aux", "position_bias") if kwargs.get(name) is not None],
    )
    if heads != noted.heads or heads % key.shape[1] or others:
        named = {"cache": "a paged cache", "s_aux": "attention sinks (s_aux)", "position_bias": "a position_bias"}
        raise Unsupported(
            f"ALiBi was given {heads} of {noted.heads} attention heads, {key.shape[1]} of keys"
            f"{''.join(f' and {named[name]}' for name in others)}. It needs layers that hold all of their heads and all keys "
            "in order, for slopes and distances, and nothing else that changes scores: do not shard attention over heads "
            "(tensor parallelism), and generate with model.generate."
        )
    return noted


def _with_biases(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """Return the additive mask ``(B or 1, heads, Q, K)`` in the query's dtype, from our mask, the user's, or none."""
    noted, heads = check_call(module, query, key, kwargs), query.shape[1]
    if mask is not None:
        mask = mask.to(query.device)  # layers may be on other devices than the embeddings
        if mask.shape[1] == heads + 1:
            return mask[:, :heads].to(query.dtype)
    # The queries are the last keys. A static cache may have empty keys after them, and the distance is then too large, by the
    # same amount for all keys of a query: softmax is invariant to that.
    keys = torch.arange(key.shape[2], device=query.device)
    queries = keys[keys.shape[0] - query.shape[2] :]
    biases = _biases(slopes_in(query.dtype, heads, query.device), queries, keys).to(query.dtype)
    if mask is None and noted.causal:
        mask = keys <= queries[:, None]
    if mask is None:
        return biases
    return torch.where(mask, biases, torch.finfo(query.dtype).min) if mask.dtype == torch.bool else biases + mask


def slopes_in(dtype: torch.dtype, heads: int, device: torch.device) -> Tensor:
    """Return the slopes in ``dtype``, or in float32 if that has more bits."""
    return alibi_slopes(heads, device=device, dtype=torch.promote_types(dtype, torch.float32))


def _biases(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return ``-slope * |i - j|`` of shape ``(1, heads, Q, K)``, for the positions of queries and keys.

    Softmax would give the same for ``slope * j``, but distances keep nearby keys exact in bfloat16.
    """
    return (slopes[:, None, None] * -(queries[:, None] - keys).abs())[None]
