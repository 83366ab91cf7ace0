"""Adapters of peft, such as LoRA: a few weights that are trained beside those of a frozen model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

#: Heads that are new and have to be trained, and what peft calls their tasks.
_HEADS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def with_adapters(model: Any, config: Any) -> nn.Module:
    """Return the model with adapters, its own weights but for a classifier's head frozen, by ``peft.get_peft_model``.

    Args:
        model: a transformers model.
        config: a configuration of peft, or the arguments of ``peft.LoraConfig`` (Hu et al. 2021, arXiv 2106.09685).

    Raises:
        ImportError: peft is not installed.
        TypeError: ``config`` is neither, or has an argument that LoRA does not know.
        ValueError: the model has adapters already, or none of its layers fits.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ImportError(
            "HuggingFaceTask(peft=…) needs peft, which is not installed. Type: pip install 'hocket-algorithms-nlp[peft]'."
        ) from error
    if isinstance(model, peft.PeftModel):
        raise ValueError("The model has adapters already: omit peft=, or give the model without them.")
    if isinstance(config, Mapping):
        try:
            config = peft.LoraConfig(**config)
        except TypeError as error:
            raise TypeError(
                f"peft={dict(config)!r} are no arguments of peft.LoraConfig: {error}. Write for instance peft={{'r': 8, "
                "'lora_alpha': 16}."
            ) from error
    if not isinstance(config, peft.PeftConfig):
        raise TypeError(
            f"peft={config!r} is {type(config).__name__}. Give the arguments of LoRA, such as {{'r': 8, 'lora_alpha': 16}}, or "
            "a configuration of peft, such as peft.IA3Config()."
        )
    if config.task_type is None:  # so that a new head is trained and saved beside the adapters
        kind = type(model).__name__
        config.task_type = next((task for name, task in _HEADS.items() if name in kind), None)
    training = model.training
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted.train(training)
