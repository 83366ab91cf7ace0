"""Find the transformers in a model that ALiBi can change, and check what it assumes of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.errors import WrongState, WrongType, WrongValue
from hocket_nlp.alibi_policies import GROUP, AlibiPolicy, policy_of
from hocket_nlp.linear_bias import IMPLEMENTATIONS, LayerBias, require_transformers
from hocket_nlp.meta_device import refuse_meta

#: Biases of at least this many bytes are mentioned.
_LARGE = 256 * 2**20


class Site(NamedTuple):
    """One transformer in a model, and where it keeps positions and attention."""

    name: str
    body: Any
    policy: AlibiPolicy

    @property
    def positions_name(self) -> str:
        """The qualified name of the module that gives positions."""
        return ".".join(filter(None, (self.name, self.policy.positions)))

    @property
    def positions(self) -> Any:
        """The module that gives positions, or None if there is none of this name."""
        part: Any = self.body
        for name in self.policy.positions.split("."):
            part = getattr(part, name, None)
        return part

    @property
    def attention(self) -> list[Any]:
        """The attention modules, one for each layer that has attention."""
        return [module for module in self.body.modules() if self.policy.attention(module)]

    @property
    def replaced(self) -> bool:
        """Whether ALiBi has replaced the module that gave positions; by an attribute that it sets."""
        return getattr(self.positions, "hocket_alibi", None) is not None

    @property
    def biased(self) -> bool:
        """Whether the configuration names biased attention."""
        return self.body.config._attn_implementation in IMPLEMENTATIONS.values()

    def notes(self) -> dict[nn.Module, LayerBias]:
        """Return the heads and the direction of each attention module."""
        heads = self.policy.heads(self.body.config)
        return {module: LayerBias(heads, self.policy.causal(module)) for module in self.attention}


def find(model: nn.Module) -> list[Site]:
    """Return the transformers in a model. Raises TypeError if there are none, or a kind that ALiBi is not defined for."""
    require_transformers()
    sites = []
    for name, body in model.named_modules():
        if reason := _obstacle(body):
            raise WrongType(f"ALiBi cannot change {type(body).__name__}: {reason}")
        if policy := policy_of(body):
            sites.append(Site(name, body, policy))
    if not sites:
        raise WrongType(
            "ALiBi supports GPT2Model, BertModel, RobertaModel and OPTModel of transformers, and models with a rotary "
            "embedding named rotary_emb, such as GPT-NeoX, Llama, Mistral, Qwen and Gemma; with any head or inside another "
            f"module, before they are compiled. There is none in {type(model).__name__}. For a class of your own, declare an "
            f"AlibiPolicy in the entry-point group {GROUP}: see the card of alibi."
        )
    return sites


def _obstacle(body: Any) -> str:
    """Return why a module can never be changed, or empty."""
    config = getattr(body, "config", None)
    if type(body).__name__ in ("BloomModel", "MptModel") or getattr(config, "alibi", False) is True:
        return "it has linear biases of its own. Train it without ALiBi."
    if hasattr(body, "get_input_embeddings") and getattr(config, "is_encoder_decoder", False):
        return (
            "it is an encoder-decoder, whose decoder attends to another sequence, where the distance of two tokens has no "
            "meaning. Use a decoder such as GPT-2 or Llama, or an encoder such as BERT."
        )
    if isinstance(getattr(body, "relative_attention_bias", None), nn.Embedding):
        return "it has learned relative position biases, to which ALiBi is an alternative. Train it without ALiBi."
    return ""


def check(site: Site) -> None:
    """Raise ValueError if ALiBi cannot be applied, before anything is changed."""
    kind, config, positions = type(site.body).__name__, site.body.config, site.positions
    implementation = config._attn_implementation
    if not isinstance(positions, nn.Module):
        inside = ", ".join(name for name, _ in site.body.named_children())
        raise WrongValue(
            f"ALiBi replaces the positions of {kind}, and it has no module {site.positions_name}: give a model whose positions "
            f"are as transformers made them, or correct its policy. It has {inside}."
        )
    if not site.replaced and not isinstance(positions, site.policy.kind):
        raise WrongValue(
            f"ALiBi replaces learned positions, and {site.positions_name} is {type(positions).__name__}, not "
            f"{site.policy.kind.__name__}: give a model whose positions are as transformers made them."
        )
    refuse_meta("ALiBi", site.body, "where its effect cannot be checked")
    if implementation not in (*IMPLEMENTATIONS, *IMPLEMENTATIONS.values()):
        raise WrongValue(
            f"ALiBi adds a bias to the attention implementations {', '.join(IMPLEMENTATIONS)}, and {kind} uses "
            f"{implementation!r}: call model.set_attn_implementation('sdpa') first."
        )
    if getattr(config, "add_cross_attention", False):
        raise WrongValue(
            f"ALiBi is defined for self-attention, and {kind} has cross-attention, where the distance of two tokens "
            "has no meaning: give a model made with «add_cross_attention=False»."
        )
    if implementation == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        raise WrongValue(
            f"ALiBi does not know reorder_and_upcast_attn, which eager {kind} follows: set it to False in the model's "
            "configuration, or call model.set_attn_implementation('sdpa') first, which does not know it either."
        )
    if not site.attention:
        raise WrongValue(
            f"ALiBi finds no attention in {kind}: correct `attention` of its policy, which chooses its attention modules."
        )
    _check_heads(kind, site.policy.heads(config), config)


def _check_heads(kind: str, heads: Any, config: Any) -> None:
    width, shared = getattr(config, "hidden_size", None), getattr(config, "num_key_value_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise WrongValue(
            f"The configuration of {kind} has {heads!r} attention heads, and ALiBi needs a positive whole number: correct it, "
            "or `heads` of its policy."
        )
    if width is not None and width % heads and not getattr(config, "head_dim", None):
        raise WrongValue(
            f"{heads} attention heads do not divide the hidden size {width} of {kind}: make the model with a hidden size that "
            f"is a multiple of {heads}."
        )
    if shared and heads % shared:
        raise WrongValue(
            f"{shared} heads of keys do not divide the {heads} attention heads of {kind}: make the model with a number of "
            "num_key_value_heads that divides num_attention_heads."
        )


def check_memory(sites: Sequence[Site], length: int, limit: float) -> None:
    """Raise ValueError if biases at the longest sequence take more than ``limit`` GiB; mention them if they are large."""
    taken = max((bias_bytes(site, length) for site in sites), default=0)
    said = (
        f"ALiBi's biases take {taken / 2**30:.2f} GiB for one sequence of {length} tokens, and as much for each sequence of a "
        "padded batch"
    )
    if taken > limit * 2**30:
        raise WrongValue(
            f"{said}: more than «max_bias_memory={limit:g}». Allow it with «max_bias_memory={taken / 2**30 + 0.005:.2f}» or "
            "more, choose a shorter max_sequence_length, or call model.set_attn_implementation('flex_attention') first, which "
            "stores no biases."
        )
    if taken >= _LARGE and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
        print(f"hocket: {said}.", file=sys.stderr, flush=True)


def bias_bytes(site: Site, length: int) -> int:
    """Return the size of the biases ``(heads + 1, length, length)`` of a sequence, for each mask of a forward pass."""
    config = site.body.config
    if config._attn_implementation in ("flex_attention", IMPLEMENTATIONS["flex_attention"]):
        return 0
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if "linear" not in kind}
    masks = max(1, len(kinds))  # full and sliding attention have a mask each
    dtype = next((each.dtype for each in site.body.parameters() if each.is_floating_point()), torch.get_default_dtype())
    return masks * (site.policy.heads(config) + 1) * length**2 * dtype.itemsize


def check_unchanged(model: nn.Module) -> None:
    """Raise RuntimeError if a model to which ALiBi was applied no longer is what ALiBi made of it."""
    try:
        sites = find(model)
    except TypeError:
        sites = []
    wrong = "" if sites else "the transformer that it changed is gone"
    for site in sites:
        wrong = wrong or _changed_since(site)
    if wrong:
        raise WrongState(
            f"ALiBi was applied to {type(model).__name__}, and {wrong}. Change the model before the Trainer is made, or apply "
            "ALiBi again with hocket_nlp.functional.alibi."
        )


def _changed_since(site: Site) -> str:
    """Return what was changed after surgery, or empty."""
    if not site.replaced:
        return f"{site.positions_name} is {type(site.positions).__name__} again, which may give positions"
    if not site.biased:
        return f"{type(site.body).__name__} now uses the attention implementation {site.body.config._attn_implementation!r}"
    for layer, noted in site.notes().items():
        before: Any = getattr(layer, "hocket_alibi", None)
        who = f"{type(layer).__name__} in {type(site.body).__name__}"
        own: Any = getattr(layer, "config", None)
        if before is None:
            return f"a layer was put in its place: {who} was not there"
        if own is not None and getattr(own, "_attn_implementation", None) not in IMPLEMENTATIONS.values():
            return f"{who} now uses the attention implementation {own._attn_implementation!r}"
        if before != noted:
            return f"{who} had {_said(before)}, and now has {_said(noted)}"
    return ""


def _said(noted: LayerBias) -> str:
    return f"{noted.heads} {'causal' if noted.causal else 'bidirectional'} heads"
