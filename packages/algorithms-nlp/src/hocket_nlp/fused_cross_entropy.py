"""Fused cross entropy: causal language models of transformers train without holding the logits of all tokens.

Sources: Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989; Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language
Models", arXiv 2411.09009.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.basics.losses import Loss, own_loss
from hocket.help import warn
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Policy, Replacement, recast, replace_modules, why_no_effect
from hocket_nlp.argument_checks import whole_number
from hocket_nlp.fused_head import FusedHead, FusedLoss, give_labels, withheld_of, withhold_logits
from hocket_nlp.fused_sites import check, sites_of

if TYPE_CHECKING:
    from hocket.state.state import State


def fused_cross_entropy(model: nn.Module, *, chunk_rows: int | None = None) -> tuple[nn.Module, list[Replacement]]:
    """Let causal language models of transformers compute their loss from hidden states, by `linear_cross_entropy`, in place.

    While such a model is in training mode and gets labels, its output layer returns the sum of the losses instead of logits,
    and the model's loss function divides it. ``outputs.loss`` is what it was before, and ``outputs.logits`` an object that
    raises an error when it is used. In evaluation mode, and without labels, nothing changes. Parameters keep their names and
    stay the same objects, tied ones too.

    A forward pass over six tokens checks that nothing comes between output layer and loss; it draws no random numbers. The loss
    is computed within the forward pass of the output layer, where FSDP has gathered its weight.

    Args:
        model: a causal language model of transformers 5 or later, or a module that holds some.
        chunk_rows: tokens whose logits are held at once; None for as many as take the memory of their hidden states, or 4
            million logits.

    Returns:
        The model, and a record of the replaced output layers.

    Raises:
        TypeError: there is no language model in ``model``.
        ValueError: a model changes logits before the loss (Gemma 2, Cohere, Granite), or computes another loss (BERT, T5); its
            output layer is not a ``torch.nn.Linear``; or it has no storage (meta).

    Warns:
        NoEffectWarning: it is applied already.

    Example:
        >>> import torch, transformers
        >>> from hocket_nlp.functional import fused_cross_entropy
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, bos_token_id=0, eos_token_id=0)
        >>> model, changed = fused_cross_entropy(transformers.GPT2LMHeadModel(config).train())
        >>> tokens = torch.arange(12).reshape(2, 6)
        >>> model(tokens, labels=tokens).loss.backward()
        >>> print(changed[0])
        lm_head: Linear -> FusedHead
    """
    chunk_rows = _rows("fused_cross_entropy", chunk_rows)
    sites = sites_of(model)
    new = [site for site in sites if not isinstance(site.head, FusedHead)]
    for site in new:
        check(site)
    heads = {site.head for site in new}
    build = Policy(lambda old, index: recast(old, FusedHead, chunk_rows=chunk_rows), lambda old: old in heads)
    changed = replace_modules(model, {nn.Linear: build})
    for site in new:
        site.model.loss_function = FusedLoss(site.model.loss_function)
        site.model.register_forward_pre_hook(give_labels, with_kwargs=True)
        site.model.register_forward_hook(withhold_logits, with_kwargs=True, always_call=True)
    if not changed:
        applied = {site.name: site.head for site in sites}
        warn(why_no_effect("FusedCrossEntropy", model, "", applied), NoEffectWarning)
    return model, changed


def _rows(who: str, given: Any) -> int | None:
    rows: int | None = whole_number(who, "chunk_rows", given, 256, of="rows of logits", optional=True)
    return rows


class FusedCrossEntropy(Algorithm):
    """Train causal language models without holding all logits (Hsu et al. 2024, arXiv 2410.10989).

    Before training, the model is changed by :func:`fused_cross_entropy`: the same loss and gradients in a fraction of the
    memory. Microbatches and ranks are weighted by the labels that count, as the model's loss is without it. Evaluation computes
    logits as always. Metrics of training have no logits to look at, and say so.

    Args:
        chunk_rows: tokens whose logits are held at once; None for as many as take the memory of their hidden states, or 4
            million logits.

    Raises:
        ValueError: ``chunk_rows`` is less than 1; later, a model that it does not support.
        TypeError: later, there is no language model.

    Warns:
        NoEffectWarning: the model gets no labels in the first batch.

    Example:
        >>> import hocket, hocket_nlp, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, bos_token_id=0, eos_token_id=0)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_nlp.FusedCrossEntropy()], device="cpu")
    """

    events = {Event.INIT}
    phase = Phase.MODEL
    conflicts = ("label-smoothing", "distillation")  # which need the logits

    def __init__(self, chunk_rows: int | None = None) -> None:
        self.chunk_rows = _rows("FusedCrossEntropy", chunk_rows)
        self._heads: list[FusedHead] = []
        self._checked = False

    def apply(self, event: Event, state: State) -> None:
        """Change the model."""
        state.model, changed = fused_cross_entropy(state.model, chunk_rows=self.chunk_rows)
        state.replacements += changed
        self._heads = [module for module in state.model.modules() if isinstance(module, FusedHead)]

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return the output layers that would be replaced."""
        return [
            f"{'.'.join(filter(None, (site.name, site.head_name)))}: {type(site.head).__name__} -> FusedHead"
            for site in sites_of(model)
            if not isinstance(site.head, FusedHead)
        ]

    @hookimpl(wrapper=True)
    def loss(self, state: State, outputs: Any, batch: Any) -> Generator[None, Loss, Loss]:
        """Weight the model's own loss by the labels that count: there are no logits from which the loop would find it out."""
        loss = yield
        if not self._checked and state.eval_label is None:
            self._checked = True
            if not any(head.used for head in self._heads):
                warn(
                    "FusedCrossEntropy has no effect: the model got no labels in the first batch, so it computed logits and no "
                    "loss. Let batches be mappings with 'labels', without «loss=», or let the task call model(**batch) and use "
                    "outputs.loss.",
                    NoEffectWarning,
                )
        withheld = withheld_of(outputs)
        if withheld is None or loss.weight is not None or own_loss(outputs) is not loss.value:
            return loss
        return loss._replace(weight=withheld.number)
