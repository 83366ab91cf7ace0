"""Find the language models to which fused cross entropy applies, and check that it computes their loss."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.errors import WrongType, WrongValue
from hocket_nlp.evaluation_mode import evaluating
from hocket_nlp.meta_device import refuse_meta

_SUPPORTED = (
    "It supports models of transformers 5 or later whose forward is logits = lm_head(hidden), with a torch.nn.Linear, and "
    "loss = self.loss_function(logits, labels, …), which is the shifted cross entropy: GPT-2, Llama, Qwen, Mistral, OPT, "
    "GPT-NeoX, Phi and others. Remove fused-cross-entropy for this model."
)


class Site(NamedTuple):
    """A language model within the model, and its output layer, with their names."""

    name: str
    model: Any
    head_name: str
    head: Any


def sites_of(model: nn.Module) -> list[Site]:
    from transformers.modeling_utils import PreTrainedModel

    sites: list[Site] = []
    for name, part in model.named_modules():
        head: Any = None
        if isinstance(part, PreTrainedModel):
            with suppress(AttributeError, NotImplementedError):
                head = part.get_output_embeddings()
        names = [inner for inner, module in part.named_modules() if module is head] if head is not None else []
        if names and all(head is not site.head for site in sites):
            sites.append(Site(name, part, names[0], head))
    if not sites:
        raise WrongType(
            f"FusedCrossEntropy found no language model of transformers, with an output layer, in {type(model).__name__}. "
            f"{_SUPPORTED}"
        )
    return sites


def check(site: Site) -> None:
    """Raise ValueError unless the head's output goes to the loss function as it is, and that is the shifted cross entropy."""
    kind, head = type(site.model).__name__, site.head
    if type(head) is not nn.Linear:
        raise WrongValue(
            f"The output layer of {kind}, {site.head_name}, is {type(head).__name__} and not torch.nn.Linear, so it may "
            f"compute other logits, as adapters and quantized layers do. {_SUPPORTED}"
        )
    refuse_meta("FusedCrossEntropy", site.model, "where its loss cannot be checked")
    try:
        problem = _problem(site)
    except Exception as error:
        problem = f"a forward pass over six tokens and their labels failed ({type(error).__name__}: {error})"
    if problem:
        raise WrongValue(f"FusedCrossEntropy cannot compute the loss of {kind}: {problem}. {_SUPPORTED}")


def _problem(site: Site) -> str:
    """Return what a model does otherwise, or an empty string."""
    model, head, plain = site.model, site.head, site.model.loss_function
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, which does not shift labels"
    tokens = (torch.arange(1, 7, device=head.weight.device) % head.out_features)[None]
    labels = torch.where(torch.arange(6, device=tokens.device) == 3, -100, tokens)
    made: list[Tensor] = []
    given: list[Any] = []
    mark = head.weight.new_full((), 0.5, dtype=torch.float32)

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        given.append(args[0] if args else kwargs["logits"])
        return mark.new_zeros(())

    with torch.no_grad(), evaluating(model):
        hook = head.register_forward_hook(lambda module, inputs, output: made.append(output))
        try:
            own = model(input_ids=tokens, labels=labels).loss
        finally:
            hook.remove()
        if len(made) != 1 or made[0].shape[:-1] != tokens.shape:
            return f"its output layer was called {len(made)} times"
        rest = own.float() - F.cross_entropy(made[0][0, :-1].float(), labels[0, 1:])
        hook = head.register_forward_hook(lambda module, inputs, output: mark)
        model.loss_function = loss_function
        try:
            added = model(input_ids=tokens, labels=labels).loss  # such as the loss of a router
        except Exception as error:  # of operations that a scalar does not have
            return f"it does not pass its logits unchanged to self.loss_function ({type(error).__name__}: {error})"
        finally:
            hook.remove()
            model.loss_function = plain
        if len(given) != 1:
            return "it does not call self.loss_function once"
        if given[0] is not mark:
            return "it changes the logits between the output layer and the loss, as soft-capping or a scale does"
        if not torch.isclose(rest, added.float(), rtol=0, atol=1e-3):
            return "its loss is not the mean cross entropy of the next tokens"
    return ""
