"""ALiBi: attention with linear biases instead of position embeddings, for models of transformers."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.algorithm import Algorithm, Phase
from hocket.hookspecs import Event
from hocket.surgery import NoEffectWarning, Replacement
from hocket_nlp.linear_bias import IMPLEMENTATIONS, alibi_slopes, register
from hocket_nlp.sequence_length import merge_and_split, scale_sequence_length

if TYPE_CHECKING:
    from hocket.state import State


def alibi(model: nn.Module, max_sequence_length: int) -> tuple[nn.Module, list[Replacement]]:
    """Replace the learned position embeddings of GPT-2, BERT or RoBERTa by linear biases on attention, in place.

    Query i and key j of head h: ``softmax_j(q_i k_j / sqrt(d) - slope_h * |i - j|)``, Press, Smith and Lewis 2022,
    "Train Short, Test Long", section 3 (arXiv 2108.12409). The paper is about decoders; in an encoder the bias is
    symmetric.

    transformers looks up attention by name, so the name in the model's configuration is changed to a biased variant of
    ``sdpa`` or ``eager``; the model gets a private copy of its configuration. Before positions are replaced, a forward pass
    over four zero vectors checks that every layer calls the biased attention and that the bias is right; it draws no random
    numbers. ``save_pretrained`` saves neither the name nor the absence of positions: apply this again to the model that
    ``from_pretrained`` returns. Its warning about newly initialised positions can be ignored.

    Args:
        model: ``GPT2Model``, ``BertModel`` or ``RobertaModel`` of transformers 5 or later, with any head, or a module
            that holds such models. Its attention implementation must be ``sdpa`` or ``eager``.
        max_sequence_length: written into the configuration, in tokens. It is the longest sequence that BERT and RoBERTa
            accept; GPT-2 has no limit.

    Returns:
        The model, and a record of the replaced position embeddings.

    Raises:
        ImportError: transformers is older than 5.
        TypeError: there is no such model in ``model``.
        ValueError: ``max_sequence_length`` is not positive; or a model has no learned positions, another attention
            implementation, cross-attention, ``reorder_and_upcast_attn`` with eager attention, or no storage (meta).
        RuntimeError: transformers does not use the biased attention. The model then computes what it did before.

    Warns:
        NoEffectWarning: the model already has linear biases and this maximum length.

    Example:
        >>> import transformers
        >>> from hocket_nlp.functional import alibi
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
        >>> model, replaced = alibi(transformers.GPT2LMHeadModel(config), max_sequence_length=64)
        >>> [replacement.name for replacement in replaced]
        ['transformer.wpe']
    """
    if max_sequence_length < 1:
        raise ValueError(f"max_sequence_length is {max_sequence_length}: give the number of tokens, at least 1.")
    register()
    sites = list(_sites(model))
    for site in sites:
        _check(site)
    for site in sites:
        _own_configuration(model, site.body)
        _bias_attention(site)
    changed = [change for site in sites for change in _remove_positions(site)]
    resized = [site for site in sites if _resize(site, max_sequence_length)]
    if not changed and not resized:
        warnings.warn(
            f"ALiBi found nothing to replace in {type(model).__name__}: it has linear biases and a maximum sequence "
            f"length of {max_sequence_length} already.",
            NoEffectWarning,
            stacklevel=2,
        )
    return model, changed


class ALiBi(Algorithm):
    """Use linear biases on attention instead of position embeddings (Press, Smith and Lewis 2022, arXiv 2108.12409).

    Before training, the model is changed by :func:`alibi`. The savings come from training on shorter sequences than the
    model is used on: with ``train_sequence_length_scaling`` below 1 every training batch is split by
    :func:`~hocket_nlp.functional.scale_sequence_length`. Evaluation batches are not changed.

    Args:
        max_sequence_length: the longest sequence that the model will be used on, in tokens.
        train_sequence_length_scaling: the length of training sequences relative to the loader's. 1 does not change
            batches; 0.25 trains on four times as many sequences of a quarter of the length.

    Raises:
        ValueError: ``train_sequence_length_scaling`` is neither a whole number nor one divided by a whole number.

    Example:
        >>> import hocket, hocket_nlp, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_nlp.ALiBi(max_sequence_length=64)], device="cpu")
    """

    events = (Event.INIT, Event.AFTER_DATALOADER)
    phase = Phase.MODEL

    def __init__(self, max_sequence_length: int, train_sequence_length_scaling: float = 1.0) -> None:
        merge_and_split(train_sequence_length_scaling)
        self.max_sequence_length = max_sequence_length
        self.train_sequence_length_scaling = train_sequence_length_scaling

    def match(self, event: Event, state: State) -> bool:
        """Return True for the model, and for batches if sequences are scaled."""
        return event is Event.INIT or self.train_sequence_length_scaling != 1

    def apply(self, event: Event, state: State) -> None:
        """Change the model once, and reshape every training batch."""
        if event is Event.INIT:
            state.model, changed = alibi(state.model, self.max_sequence_length)
            state.replacements += changed
        else:
            state.batch = scale_sequence_length(state.batch, self.train_sequence_length_scaling)

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return the position embeddings that would be replaced, and the attention that would be biased."""
        return [
            f"{site.positions}: Embedding -> NoPositions; linear biases in {len(site.attention)} layers of "
            f"{site.body.config.num_attention_heads} heads"
            for site in _sites(model)
            if isinstance(getattr(site.holder, site.attribute), nn.Embedding)
        ]


class NoPositions(nn.Module):
    """Replaces a position embedding: has no weights, takes any positions, returns a scalar zero to add."""

    def forward(self, positions: Tensor) -> Tensor:
        """Return a 0-dimensional zero: adding it keeps shape and dtype."""
        return torch.zeros((), device=positions.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register()  # a model unpickled in another process needs the attention functions there


# --- finding and checking


class _Site(NamedTuple):
    """One transformer: its position embedding, and its attention modules."""

    name: str
    body: Any
    holder: Any
    attribute: str
    attention: Sequence[nn.Module]

    @property
    def positions(self) -> str:
        """The qualified name of the position embedding."""
        path = "" if self.holder is self.body else "embeddings"
        return ".".join(filter(None, (self.name, path, self.attribute)))


def _sites(model: nn.Module) -> list[_Site]:
    from transformers.models.bert.modeling_bert import BertModel, BertSelfAttention
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model
    from transformers.models.roberta.modeling_roberta import RobertaModel, RobertaSelfAttention

    attention = (GPT2Attention, BertSelfAttention, RobertaSelfAttention)
    sites = []
    for name, body in model.named_modules():
        layers = [module for module in body.modules() if isinstance(module, attention)]
        if isinstance(body, GPT2Model):
            sites.append(_Site(name, body, body, "wpe", layers))
        elif isinstance(body, BertModel | RobertaModel):
            sites.append(_Site(name, body, body.embeddings, "position_embeddings", layers))
    if not sites:
        raise TypeError(
            "ALiBi supports GPT2Model, BertModel and RobertaModel of transformers, with any head or inside another "
            f"module, and there is none in {type(model).__name__}. Give one of these, before it is compiled; a model "
            "with rotary positions, such as Llama, has no learned positions that could be replaced."
        )
    return sites


def _check(site: _Site) -> None:
    """Raise ValueError if ALiBi cannot be applied."""
    kind, config, positions = type(site.body).__name__, site.body.config, getattr(site.holder, site.attribute)
    implementation = config._attn_implementation
    if not isinstance(positions, nn.Embedding | NoPositions):
        raise ValueError(
            f"ALiBi replaces learned positions, and {site.positions} is {type(positions).__name__}, not Embedding: "
            "give a model whose positions are as transformers made them."
        )
    if site.body.get_input_embeddings().weight.is_meta:
        raise ValueError(
            f"ALiBi checks its effect, but {kind} is on the meta device, where nothing is computed: give it storage "
            "first, with model.to_empty(device=...) or by loading its weights."
        )
    if implementation not in (*IMPLEMENTATIONS, *IMPLEMENTATIONS.values()):
        raise ValueError(
            f"ALiBi adds a bias to the attention implementations {' and '.join(IMPLEMENTATIONS)}, and {kind} uses "
            f"{implementation!r}: call model.set_attn_implementation('sdpa') first."
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"ALiBi is defined for self-attention, and {kind} has cross-attention, where the distance of two tokens "
            "has no meaning: give a model made with add_cross_attention=False."
        )
    if implementation == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        raise ValueError(
            f"ALiBi does not know reorder_and_upcast_attn, which eager {kind} follows: set it to False in the model's "
            "configuration, or call model.set_attn_implementation('sdpa') first, which does not know it either."
        )


# --- the attention


def _own_configuration(model: nn.Module, body: Any) -> None:
    """Give the model its own configuration: other models made from the same one must not get biases."""
    shared = body.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _bias_attention(site: _Site) -> None:
    """Switch to the biased attention and check that it is used; otherwise switch back and raise RuntimeError."""
    before = site.body.config._attn_implementation
    name = IMPLEMENTATIONS.get(before, before)
    site.body.set_attn_implementation(name)
    try:
        _probe(site, name)
    except RuntimeError:
        site.body.set_attn_implementation(before)
        raise


def _probe(site: _Site, name: str) -> None:
    """Compare every layer's attention pattern for identical keys in a short forward pass.

    With zero queries the scores are the bias alone, and with the identity for values the output is the softmax of the
    scores, so the comparison does not depend on the weights.
    """
    import transformers

    body, advice = site.body, "Use a version of transformers that hocket-algorithms-nlp is tested with."
    version = f"transformers {transformers.__version__}"
    function = transformers.AttentionInterface()[name]
    patterns: dict[nn.Module, Tensor] = {}

    def recorder(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        identity = torch.eye(key.shape[2], dtype=value.dtype, device=value.device).expand(*value.shape[:2], -1, -1)
        output, _ = function(
            module, torch.zeros_like(query), key, identity, attention_mask, **{**kwargs, "dropout": 0.0}
        )
        patterns[module] = output.transpose(1, 2)[0]
        return function(module, query, key, value, attention_mask, **kwargs)

    weight = body.get_input_embeddings().weight
    inputs = weight.new_zeros(1, min(4, body.config.max_position_embeddings), body.config.hidden_size)
    transformers.AttentionInterface.register(name, recorder)
    try:
        with torch.no_grad(), _evaluating(body):
            body(inputs_embeds=inputs, use_cache=False)
    except Exception as error:
        raise RuntimeError(
            f"A trial forward pass of {type(body).__name__} with biased attention failed in {version} ({error}). "
            f"{advice}"
        ) from error
    finally:
        transformers.AttentionInterface.register(name, function)

    called = sum(module in patterns for module in site.attention)
    if called < max(1, len(site.attention)):
        raise RuntimeError(
            f"{version} called the biased attention in {called} of {len(site.attention)} layers of "
            f"{type(body).__name__}: in the others ALiBi would have no effect. {advice}"
        )
    for module, pattern in patterns.items():
        causal = bool(module.is_causal) and getattr(body.config, "is_causal", True)
        expected = _expected_pattern(body.config.num_attention_heads, pattern.shape[-1], causal, pattern.device)
        difference = (pattern.float() - expected).abs().max().item()
        if not difference <= max(1e-5, 4 * torch.finfo(pattern.dtype).eps):
            raise RuntimeError(
                f"{version} called the biased attention of {type(body).__name__}, but its weights differ by "
                f"{difference:.2g} from softmax(-slope * distance). {advice}"
            )


def _expected_pattern(heads: int, length: int, causal: bool, device: torch.device) -> Tensor:
    """Return ``softmax(-slope * |i - j|)``, computed explicitly: ``(heads, length, length)``."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    scores = -alibi_slopes(heads, device=device)[:, None, None] * distance.abs()
    return (scores.masked_fill(distance < 0, -math.inf) if causal else scores).softmax(-1)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode, and restore each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# --- the positions


def _remove_positions(site: _Site) -> list[Replacement]:
    old = getattr(site.holder, site.attribute)
    if isinstance(old, NoPositions):
        return []
    new = NoPositions().train(old.training)
    setattr(site.holder, site.attribute, new)
    return [Replacement(site.positions, old, new)]


def _resize(site: _Site, length: int) -> bool:
    """Allow sequences of this length; return whether that changed anything."""
    # RoBERTa counts positions from padding_idx + 1 on.
    rows = length + getattr(site.holder, "padding_idx", -1) + 1
    if site.body.config.max_position_embeddings == rows:
        return False
    site.body.config.max_position_embeddings = rows
    for name in ("position_ids", "token_type_ids"):
        buffer = getattr(site.holder, name, None)
        if buffer is not None:
            ids = torch.arange(rows, device=buffer.device)[None]
            values = ids if name == "position_ids" else torch.zeros_like(ids)
            site.holder.register_buffer(name, values, persistent=False)
    return True
