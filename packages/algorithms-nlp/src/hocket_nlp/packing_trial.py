"""Find out whether a model keeps packed documents apart, by short forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket.errors import WrongType, WrongValue
from hocket_nlp.evaluation_mode import evaluating
from hocket_nlp.meta_device import refuse_meta

_SUPPORTED = (
    "Packing supports models of transformers 5 or later with one output for each token: causal ones that tell documents apart "
    "by position_ids, such as GPT-2, Llama, Qwen, Mistral and Gemma, and bidirectional ones that take masks of pairs of "
    "tokens, such as BERT and RoBERTa, both with the attention implementation sdpa, causal ones with eager too: call "
    "model.set_attn_implementation('sdpa'), or remove packing."
)


class Layout(NamedTuple):
    """What a packed batch has to look like for a model; see `hocket_nlp.packing.pack`."""

    causal: bool = True
    first_position: int = 0


def language_models(model: nn.Module) -> list[Any]:
    """Return the models of transformers in a module that are not part of another one. Raises TypeError if there is none."""
    from transformers.modeling_utils import PreTrainedModel

    found: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part not in inner:
            found.append(part)
            inner.update(part.modules())
    if not found:
        raise WrongType(f"Packing found no model of transformers in {type(model).__name__}. {_SUPPORTED}")
    return found


def layout_of(model: nn.Module, pack: Callable[..., Any]) -> Layout:
    """Return how batches have to be packed for a model.

    Raises:
        ValueError: the model does not compute the same for packed documents as for each alone.
        TypeError: there is no model of transformers.
    """
    layouts = {_layout(each, pack) for each in language_models(model)}
    if len(layouts) > 1:
        raise WrongValue(
            f"{type(model).__name__} holds models of transformers that need batches packed in different ways. Remove packing."
        )
    return layouts.pop()


def _layout(model: Any, pack: Callable[..., Any]) -> Layout:
    kind = type(model).__name__
    refuse_meta("Packing", model, "where it cannot be tried")
    try:
        with torch.enable_grad(), evaluating(model):
            found = _try(model, pack)
    except Exception as error:
        raise WrongValue(
            f"Packing tried {kind} on ten tokens, and that failed ({type(error).__name__}: {error}). {_SUPPORTED}"
        ) from error
    if isinstance(found, str):
        raise WrongValue(f"Packing cannot be used with {kind}: {found}. {_SUPPORTED}")
    return found


def _try(model: Any, pack: Callable[..., Any]) -> Layout | str:
    """Return the first layout with which documents in a row get what each gets alone; or why there is none."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, whose two sides would have to be packed alike"
    weight, padding = model.get_input_embeddings().weight, getattr(model.config, "pad_token_id", None)
    usable = [each for each in range(min(len(weight), 100)) if each != padding]
    tokens = torch.tensor([usable[(5 * place + 1) % len(usable)] for place in range(9)], device=weight.device)
    documents = tokens.split((3, 2, 4))  # the first two will share a row, and the third one has a row with padding
    alone = [_Pass(model, {"input_ids": each[None]}) for each in documents]
    if any(each.outputs.shape[1:2] != document.shape for each, document in zip(alone, documents, strict=True)):
        return "it does not return one output for each token"
    first_reached, *later_reached = alone[2].reach(0, slice(0, 1))[0].tolist()
    if not first_reached:
        return "its outputs do not depend on its input tokens, so the trial shows nothing"
    causal = not any(later_reached)
    padded = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in documents], batch_first=True)
    rounding = 1e-5 if weight.dtype.itemsize >= 4 else 3e-2
    problem = ""
    for first in (0, 1 + (padding or 0)):
        batch = pack({"input_ids": padded, "attention_mask": mask}, 5, causal=causal, first_position=first)
        try:
            packed = _Pass(model, batch)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            problem = f"a forward pass of packed documents failed ({type(error).__name__}: {error})"
            continue
        places = ((0, slice(0, 3)), (0, slice(3, 5)), (1, slice(0, 4)))
        # Exactly 0 whatever the dtype, where values of an untrained model may differ by little.
        if any(_reaches_others(packed.reach(row, place), row, place) for row, place in places):
            problem = "documents in a row attend to each other"
        elif any(_differ(packed.states[at], each.states[0], rounding) for at, each in zip(places, alone, strict=True)):
            problem = "packed documents have other positions than separate ones"
        else:
            return Layout(causal, first)
    return problem


class _Pass:
    """A forward pass that is differentiated by the embeddings of its tokens."""

    def __init__(self, model: Any, batch: dict[str, Any]) -> None:
        leaves: list[Tensor] = []
        states: list[Tensor] = []

        def leaf(module: Any, inputs: Any, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        # With output_hidden_states=True, transformers would leave hooks on every layer.
        hooks = [
            model.get_input_embeddings().register_forward_hook(leaf),
            model.base_model.register_forward_hook(lambda module, inputs, output: states.append(output[0])),
        ]
        try:
            outputs = model(**batch, return_dict=True)
        finally:
            for hook in hooks:
                hook.remove()
        #: Logits, or else hidden states.
        self.outputs: Tensor = outputs["logits"] if "logits" in outputs else outputs[0]
        #: The last hidden states, because an output layer may begin with zeros; some models do not call their base model.
        self.states: Tensor = states[0] if states else self.outputs
        self._tokens = leaves[0]

    def reach(self, row: int, place: slice) -> Tensor:
        """Return which tokens the outputs of a part of a row depend on, as booleans ``(rows, length)``."""
        part = self.states[row, place].float()
        # Not the plain sum, which does not depend on anything after a layer norm.
        mixed = (part * torch.arange(part.numel(), device=part.device).view(part.shape).cos()).sum()
        (gradient,) = torch.autograd.grad(mixed, self._tokens, retain_graph=True)
        return (gradient != 0).any(-1)


def _reaches_others(reached: Tensor, row: int, place: slice) -> bool:
    """Whether a document reaches tokens of others."""
    others = torch.ones_like(reached)
    others[row, place] = False
    return bool((reached & others).any())


def _differ(some: Tensor, others: Tensor, rounding: float) -> bool:
    return bool((some - others).abs().max() > rounding * others.abs().max())


def passes_on(module: Any, args: Any, kwargs: dict[str, Any], batch: Any) -> str:
    """Return what a call of the model lacks that the packed batch holds, or an empty string."""

    def given(name: str) -> bool:
        wanted = batch[name]
        return any(
            isinstance(each, Tensor) and each.shape == wanted.shape and torch.equal(each, wanted.to(each.device))
            for each in (*args, *kwargs.values())
        )

    if not given("position_ids"):
        return "did not get its position_ids"
    if batch.get("attention_mask") is not None:
        return "" if given("attention_mask") else "did not get its attention_mask"
    if kwargs.get("attention_mask") is not None:
        return "got an attention_mask, which a packed batch does not have"
    cached = getattr(module.config, "use_cache", False) if kwargs.get("use_cache") is None else kwargs["use_cache"]
    if cached and not any(getattr(each, "gradient_checkpointing", False) for each in module.modules()):
        return "did not get use_cache=False"
    return ""
