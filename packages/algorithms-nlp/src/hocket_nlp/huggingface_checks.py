"""Check what `HuggingFaceTask` is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hocket.errors import WrongType, WrongValue
from hocket.state.task import SupervisedTask


def transformers_model(model: Any) -> Any:
    """Return the model, without adapters of peft. Raises TypeError for anything but a model, or for a wrapped one."""
    advice = "Give a model of transformers, such as transformers.AutoModelForCausalLM.from_pretrained(folder)."
    if isinstance(model, type) or not isinstance(model, nn.Module):
        raise WrongType(f"HuggingFaceTask was given {model!r}, which is not a model. {advice}")
    if (
        isinstance(model, SupervisedTask)
        or hasattr(model, "_orig_mod")
        or isinstance(model, nn.parallel.DistributedDataParallel)
    ):
        raise WrongType(
            f"HuggingFaceTask was given a {type(model).__name__}, which wraps a model. Give the model itself; «compile=» and "
            "«strategy=» of the Trainer compile and distribute it."
        )
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise TypeError for anything but a tokenizer, and ValueError if it has more tokens than the model has embeddings."""
    if not hasattr(tokenizer, "decode") or not hasattr(tokenizer, "__len__"):
        raise WrongType(
            f"«tokenizer={tokenizer!r}» is not a tokenizer. Give one of transformers, such as "
            "AutoTokenizer.from_pretrained(folder)."
        )
    try:
        rows = model.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):  # a model without tokens
        return
    if len(tokenizer) > rows:
        raise WrongValue(
            f"The tokenizer has {len(tokenizer)} tokens, and {type(model).__name__} has embeddings for {rows}: larger ones "
            "would be out of range. Call model.resize_token_embeddings(len(tokenizer)) first, or give the model's own "
            "tokenizer."
        )


def without_loss(kind: str, batch: Any) -> str:
    """Return the message about a batch for which the model computed no loss."""
    entries: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    if entries.get("labels") is not None:
        return (
            f"{kind} returned no loss, although the batch has 'labels'. Give a model whose outputs have a loss, as those "
            "of transformers with «return_dict=True»."
        )
    rename = " Rename 'label' to 'labels'." if "label" in entries else ""
    return (
        f"{kind} computed no loss: the batch has {', '.join(map(repr, entries))}, and no 'labels'.{rename} Add them to "
        "the samples, or collate with transformers.DataCollatorForLanguageModeling, DataCollatorForSeq2Seq or "
        "DataCollatorWithPadding."
    )
