"""Where classes of models keep their positions and their attention: one `AlibiPolicy` for each class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
from torch import nn

from hocket.errors import WrongState
from hocket_nlp.alibi_positions import no_positions, no_rotation

#: The entry-point group of other distributions' policies: full name of the model's class = object reference of a policy.
GROUP = "hocket_nlp.v1.alibi_policies"


def is_attention(module: nn.Module) -> bool:
    """Whether a module is attention of transformers: it declares whether it is causal, which attention functions read."""
    return hasattr(module, "is_causal")


def is_causal(module: Any) -> bool:
    """Whether an attention module is causal, by itself and by its configuration."""
    return bool(module.is_causal) and bool(getattr(getattr(module, "config", None), "is_causal", True))


def heads_of(config: Any) -> int:
    """Return the number of query heads that a configuration declares."""
    return config.num_attention_heads  # type: ignore[no-any-return]


def set_length(body: Any, length: int) -> None:
    """Write the longest sequence into the configuration."""
    body.config.max_position_embeddings = length


@dataclass(frozen=True)
class AlibiPolicy:
    """How ALiBi finds and removes positions in models of one class, the *body*: the module whose ``config`` attention reads.

    Its attention must look up its function in ``transformers.AttentionInterface`` and its masks come from
    ``transformers.masking_utils``; a trial forward pass checks that, and that no positions are left.

    Args:
        positions: path from the body to the module that gives positions, such as ``"embeddings.position_embeddings"``.
        kind: the class that this module must have.
        replacement: makes the module that replaces it. The new module must accept every call that the old one accepts.
        attention: whether a submodule of the body computes self-attention, in one of its layers.
        causal: whether such a module is causal. In the others the bias is symmetric.
        heads: the number of query heads in the body's configuration.
        resize: lets the body take sequences of a length, which it writes into the configuration.

    Example:
        >>> from hocket_nlp import AlibiPolicy
        >>> AlibiPolicy(positions="decoder.wpe").kind
        <class 'torch.nn.modules.sparse.Embedding'>
    """

    positions: str
    kind: type[nn.Module] = nn.Embedding
    replacement: Callable[[nn.Module], nn.Module] = no_positions
    attention: Callable[[nn.Module], bool] = is_attention
    causal: Callable[[Any], bool] = is_causal
    heads: Callable[[Any], int] = heads_of
    resize: Callable[[Any, int], None] = set_length


def policy_of(body: nn.Module) -> AlibiPolicy | None:
    """Return the policy of a module's class or of its nearest base class that has one, or None.

    Policies of other distributions come first, then those of this package, by class and then by structure: a transformer
    whose rotary embedding is its submodule ``rotary_emb``. Imports nothing but the policy itself.

    Raises:
        RuntimeError: a policy of another distribution cannot be loaded, is none, or two declare the same class.
    """
    declared = _declared()
    for kind in type(body).__mro__:
        if points := declared.get(f"{kind.__module__}.{kind.__qualname__}"):
            return _load(points)
        if kind.__module__.startswith("transformers.") and kind.__name__ in _BY_CLASS:
            return _BY_CLASS[kind.__name__]
    return _ROTARY if _has_rotary(body) else None


def forget() -> None:
    """Read the entry points anew at the next lookup, after a package was installed."""
    _declared.cache_clear()


@functools.cache
def _declared() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _load(points: list[EntryPoint]) -> AlibiPolicy:
    dists = sorted({point.dist.name if point.dist else "unknown" for point in points})
    if len({point.value for point in points}) > 1:
        raise WrongState(
            f"Several distributions declare an ALiBi policy for {points[0].name}: {', '.join(dists)}. Uninstall all but one."
        )
    point = points[0]
    what = f"The ALiBi policy of {dists[0]} for {point.name}"
    try:
        policy = point.load()
    except Exception as error:
        raise WrongState(
            f"{what} cannot be loaded from {point.value}: {type(error).__name__}: {error}. Upgrade or uninstall {dists[0]}."
        ) from error
    if not isinstance(policy, AlibiPolicy):
        raise WrongState(f"{what} is {policy!r}, not a hocket_nlp.AlibiPolicy. Upgrade or uninstall {dists[0]}.")
    return policy


def _has_rotary(body: Any) -> bool:
    """Whether a module is a transformer over tokens whose rotary embedding is its own submodule."""
    if "rotary_emb" not in body._modules or not hasattr(body, "get_input_embeddings"):
        return False
    try:
        return isinstance(body.get_input_embeddings(), nn.Embedding)
    except NotImplementedError:  # of images or sound
        return False


def _resize_bert(body: Any, length: int) -> None:
    """Let BERT and its descendants take sequences of any length: they look positions up in buffers too."""
    embeddings = body.embeddings
    # RoBERTa counts positions from padding_idx + 1 on.
    rows = length + getattr(embeddings, "padding_idx", -1) + 1
    body.config.max_position_embeddings = rows
    ids = torch.arange(rows, device=embeddings.position_ids.device)[None]
    embeddings.register_buffer("position_ids", ids, persistent=False)
    # Without this buffer of zeros, types of tokens default to new zeros, for sequences of any length.
    if "token_type_ids" in embeddings._buffers:
        del embeddings.token_type_ids


_BERT = AlibiPolicy("embeddings.position_embeddings", resize=_resize_bert)
_ROTARY = AlibiPolicy("rotary_emb", nn.Module, no_rotation)
#: By the name of a class in transformers.
_BY_CLASS = {
    "GPT2Model": AlibiPolicy("wpe"),
    "BertModel": _BERT,
    "RobertaModel": _BERT,
    "XLMRobertaModel": _BERT,
    "CamembertModel": _BERT,
    "ElectraModel": _BERT,
    "OPTDecoder": AlibiPolicy("embed_positions"),
}
