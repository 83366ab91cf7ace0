"""ALiBi: attention with linear biases instead of position embeddings, for models of transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Policy, Replacement, replace_modules
from hocket_nlp.alibi_positions import check_replacement
from hocket_nlp.alibi_probe import probe
from hocket_nlp.alibi_sites import Site, check, check_memory, check_unchanged, find
from hocket_nlp.argument_checks import number, whole_number
from hocket_nlp.linear_bias import IMPLEMENTATIONS, register
from hocket_nlp.sequence_length import merge_and_split, scale_sequence_length

if TYPE_CHECKING:
    from hocket.state.state import State

#: The most that biases may take in memory without a word from the user, in GiB.
_MEMORY = 2.0


def alibi(
    model: nn.Module, max_sequence_length: int, *, max_bias_memory: float = _MEMORY
) -> tuple[nn.Module, list[Replacement]]:
    """Replace the positions of language models of transformers by linear biases on attention, in place.

    Query i and key j of head h: ``softmax_j(q_i k_j / sqrt(d) - slope_h * |i - j|)``, Press, Smith and Lewis 2022,
    "Train Short, Test Long", section 3 (arXiv 2108.12409). The paper is about decoders; in an encoder the bias is
    symmetric. Slopes are those of query heads, also where heads share keys and values. Sliding windows stay.

    Learned position embeddings (GPT-2, BERT, RoBERTa, OPT) give way to zeros, and rotary ones (GPT-NeoX, Llama, Mistral,
    Qwen, Gemma, Phi and others with a module ``rotary_emb``) to a rotation by zero. Other classes need an
    :class:`~hocket_nlp.AlibiPolicy`.

    transformers looks up attention by name, so the name in the model's configuration is changed to a biased variant of
    ``sdpa``, ``eager`` or ``flex_attention``; the model gets a private copy of its configuration. A forward pass over four
    equal vectors checks that every layer calls the biased attention, that the bias is right and that no positions are left;
    it draws no random numbers. ``save_pretrained`` saves neither the name nor the absence of positions: apply this again to
    the model that ``from_pretrained`` returns. Its warning about newly initialised positions can be ignored.

    Args:
        model: a model of transformers 5 or later, with any head, or a module that holds such models. Its attention
            implementation must be ``sdpa``, ``eager`` or ``flex_attention``.
        max_sequence_length: written into the configuration, in tokens. The model accepts longer sequences too.
        max_bias_memory: the most that biases may take in memory for a sequence of ``max_sequence_length``, in GiB: ``heads +
            1`` numbers for each pair of tokens. ``flex_attention`` stores none.

    Returns:
        The model, and a record of the replaced position embeddings, for `hocket.surgery.update_optimizer`.

    Raises:
        ImportError: transformers is missing or older than 5.
        TypeError: there is no such model in ``model``, an encoder-decoder, or one with linear or relative biases of its own;
            or a policy's replacement cannot be called as the module that it replaces.
        ValueError: ``max_sequence_length`` is not positive, or its biases take more memory than allowed; or a model has no
            positions where its policy says, another attention implementation, cross-attention, heads that do not fit its
            size, ``reorder_and_upcast_attn`` with eager attention, or no storage (meta).
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
    max_sequence_length, max_bias_memory = _sizes("alibi", max_sequence_length, max_bias_memory)
    register()
    sites = find(model)
    for site in sites:
        check(site)
    check_memory(sites, max_sequence_length, max_bias_memory)
    replacements = {site.positions: new for site in sites if (new := _replacement(site)) is not None}
    with ExitStack() as undo:
        for site in sites:
            _bias_attention(model, site, undo)
        changed = _replace(model, replacements, undo)
        for site in sites:
            probe(site)
        undo.pop_all()
    lengths = [_resize(site, max_sequence_length) for site in sites]
    if not changed and not any(lengths):
        warn(
            f"ALiBi found nothing to replace in {type(model).__name__}: it has linear biases and a maximum sequence "
            f"length of {max_sequence_length} already.",
            NoEffectWarning,
        )
    return model, changed


class ALiBi(Algorithm):
    """Use linear biases on attention instead of position embeddings (Press, Smith and Lewis 2022, arXiv 2108.12409).

    Before training, the model is changed by :func:`alibi`. The savings come from training on shorter sequences than the
    model is used on: with ``train_sequence_length_scaling`` below 1 every training batch is split by
    :func:`~hocket_nlp.functional.scale_sequence_length`. Evaluation batches are not changed. Each fit begins with a check
    that nobody has given the model positions or other attention since.

    Args:
        max_sequence_length: the longest sequence that the model will be used on, in tokens.
        train_sequence_length_scaling: the length of training sequences relative to the loader's. 1 does not change
            batches; 0.25 trains on four times as many sequences of a quarter of the length.
        max_bias_memory: the most that the biases of one sequence may take in memory, in GiB.

    Raises:
        ValueError: ``train_sequence_length_scaling`` is neither a whole number nor one divided by a whole number, or another
            argument is out of range.

    Example:
        >>> import hocket, hocket_nlp, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_nlp.ALiBi(max_sequence_length=64)], device="cpu")
    """

    events = (Event.INIT, Event.BEFORE_FIT, Event.AFTER_DATALOADER)
    phase = Phase.MODEL

    def __init__(
        self, max_sequence_length: int, train_sequence_length_scaling: float = 1.0, max_bias_memory: float = _MEMORY
    ) -> None:
        merge_and_split(train_sequence_length_scaling)
        self.max_sequence_length, self.max_bias_memory = _sizes("ALiBi", max_sequence_length, max_bias_memory)
        self.train_sequence_length_scaling = train_sequence_length_scaling

    def match(self, event: Event, state: State) -> bool:
        """Return True for the model and the beginning of a fit, and for batches if sequences are scaled."""
        return event is not Event.AFTER_DATALOADER or self.train_sequence_length_scaling != 1

    def apply(self, event: Event, state: State) -> None:
        """Change the model once, check it when a fit begins, and reshape every training batch."""
        if event is Event.INIT:
            state.model, changed = alibi(state.model, self.max_sequence_length, max_bias_memory=self.max_bias_memory)
            state.replacements += changed
        elif event is Event.BEFORE_FIT:
            check_unchanged(state.model)
        else:
            state.batch = scale_sequence_length(state.batch, self.train_sequence_length_scaling)

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return the position embeddings that would be replaced, and the attention that would be biased."""
        return [
            f"{site.positions_name}: {type(site.positions).__name__} -> no positions; linear biases in "
            f"{len(site.attention)} layers of {site.policy.heads(site.body.config)} heads"
            for site in find(model)
            if not site.replaced
        ]


def _sizes(who: str, length: Any, memory: Any) -> tuple[int, float]:
    return whole_number(who, "max_sequence_length", length, 1024), number(
        who, "max_bias_memory", memory, _MEMORY, least=0
    )


# --- surgery


def _replacement(site: Site) -> nn.Module | None:
    """Return the module that replaces positions, or None if they are replaced already."""
    if site.replaced:
        return None
    new = site.policy.replacement(site.positions)
    check_replacement(site.positions_name, site.positions, new)
    new.hocket_alibi = True  # type: ignore[assignment]  # mypy: torch declares attributes as modules
    return new


def _bias_attention(model: nn.Module, site: Site, undo: ExitStack) -> None:
    """Switch to the biased attention, in a configuration of the model's own, and note heads on attention modules."""
    before = site.body.config._attn_implementation
    _own_configuration(model, site, undo)
    heads = site.policy.heads(site.body.config)
    if getattr(site.body.config, "num_attention_heads", None) != heads:
        site.body.config.num_attention_heads = heads  # which the mask function reads
    for module, noted in site.notes().items():
        undo.callback(_restore, module, "hocket_alibi", vars(module).get("hocket_alibi"))
        module.hocket_alibi = noted  # type: ignore[assignment]  # mypy: torch declares attributes as modules
    site.body.set_attn_implementation(IMPLEMENTATIONS.get(before, before))


def _own_configuration(model: nn.Module, site: Site, undo: ExitStack) -> None:
    """Give the model its own configuration: other models made from the same one must not get biases."""
    shared = site.body.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            undo.callback(setattr, module, "config", shared)
            module.config = own


def _restore(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        vars(module).pop(name, None)
    else:
        setattr(module, name, value)


def _replace(model: nn.Module, replacements: dict[nn.Module, nn.Module], undo: ExitStack) -> list[Replacement]:
    """Replace modules wherever they are in the model."""
    policies: dict[type[nn.Module], Policy] = {}
    for old in replacements:
        policies[type(old)] = Policy(lambda module, index: replacements[module], lambda module: module in replacements)
    for container in model.modules():
        for name, child in container._modules.items():
            if child in replacements:
                undo.callback(container._modules.__setitem__, name, child)
    return replace_modules(model, policies)


def _resize(site: Site, length: int) -> bool:
    """Allow sequences of this length; return whether that changed the configuration."""
    before = getattr(site.body.config, "max_position_embeddings", None)
    site.policy.resize(site.body, length)
    return bool(before != site.body.config.max_position_embeddings)
