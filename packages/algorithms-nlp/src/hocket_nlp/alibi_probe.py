"""A trial forward pass that checks the effect of ALiBi on a transformer."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import WrongState
from hocket_nlp.alibi_sites import Site
from hocket_nlp.evaluation_mode import evaluating
from hocket_nlp.linear_bias import LayerBias, alibi_slopes


def probe(site: Site) -> None:
    """Compare every layer's attention pattern with the formula, and the first layer's queries and keys with each other.

    All tokens of the trial are the same vector, so without positions all queries of the first layer are equal, and all keys.
    In every layer, queries are replaced by zeros, so that scores are the bias alone, and values by the identity, so that
    the output is the softmax of the scores. So the comparison does not depend on the weights. Draws no random numbers.

    Raises:
        RuntimeError: the forward pass failed, some layer does not call the biased attention, its weights are not those of
            the formula, or positions are left.
    """
    import transformers

    body, kind = site.body, type(site.body).__name__
    version, notes = f"transformers {transformers.__version__}", site.notes()
    advice = (
        "Use a version of transformers that hocket-algorithms-nlp is tested with, and a model whose attention calls functions "
        "of transformers.AttentionInterface."
    )
    try:
        patterns, positions = _observe(site)
    except Exception as error:
        raise WrongState(
            f"A trial forward pass of {kind} with biased attention failed in {version} ({error}). {advice}"
        ) from error

    called = sum(module in patterns for module in notes)
    if called < len(notes):
        raise WrongState(
            f"{version} called the biased attention in {called} of {len(notes)} layers of {kind}: in the others ALiBi would "
            f"have no effect. {advice}"
        )
    for module, pattern in patterns.items():
        expected = _expected_pattern(notes[module], pattern)
        difference = (pattern - expected).abs().max().item()
        if not difference <= max(1e-5, 4 * torch.finfo(body.dtype).eps):
            raise WrongState(
                f"{version} called the biased attention of {kind}, but its weights differ by {difference:.2g} from "
                f"softmax(-slope * distance). {advice}"
            )
    if not positions <= min(0.1, 1e3 * torch.finfo(body.dtype).eps):
        raise WrongState(
            f"{kind} still has positions after {site.positions_name} was replaced: queries or keys of equal tokens differ by "
            f"{positions:.2g} of their size. Correct `positions` or `replacement` of its policy. {advice}"
        )


def _observe(site: Site) -> tuple[dict[nn.Module, Tensor], float]:
    """Return the attention pattern of each module that was called, and how much queries and keys of the first one differ."""
    import transformers

    body, name = site.body, site.body.config._attn_implementation
    function = transformers.AttentionInterface()[name]
    patterns: dict[nn.Module, Tensor] = {}
    positions = 0.0

    def recorder(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        nonlocal positions
        if not patterns:
            positions = max(_spread(query), _spread(key))
        identity = torch.eye(key.shape[2], dtype=value.dtype, device=value.device).expand(*value.shape[:2], -1, -1)
        options = {**kwargs, "dropout": 0.0}
        output, _ = function(module, torch.zeros_like(query), key, identity, attention_mask, **options)
        patterns[module] = output.transpose(1, 2)[0].double()
        return function(module, query, key, value, attention_mask, **kwargs)

    weight = body.get_input_embeddings().weight
    # A vector that no layer norm maps to zeros.
    token = torch.cos(torch.arange(weight.shape[1], device=weight.device)).to(weight.dtype)
    window = getattr(body.config, "sliding_window", None) or 4
    inputs = token.expand(1, min(4, window, body.config.max_position_embeddings), -1)
    transformers.AttentionInterface.register(name, recorder)
    try:
        # Compiling kernels for four tokens would take longer than everything else; flex_attention warns where they are not.
        with torch.no_grad(), evaluating(body), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body(inputs_embeds=inputs, use_cache=False)
    finally:
        transformers.AttentionInterface.register(name, function)
    return patterns, positions


def _spread(rows: Tensor) -> float:
    """Return the largest difference between positions of ``(B, heads, L, d)``, relative to the largest number."""
    return float((rows - rows[:, :, :1]).abs().max() / rows.abs().max().clamp_min(1e-30))


def _expected_pattern(noted: LayerBias, like: Tensor) -> Tensor:
    """Return ``softmax(-slope * |i - j|)``, computed explicitly: ``(heads, length, length)``."""
    positions = torch.arange(like.shape[-1], device=like.device)
    distance = positions[:, None] - positions
    scores = -alibi_slopes(noted.heads, device=like.device, dtype=like.dtype)[:, None, None] * distance.abs()
    return (scores.masked_fill(distance < 0, -math.inf) if noted.causal else scores).softmax(-1)
