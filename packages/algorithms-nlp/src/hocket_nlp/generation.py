"""Generate text: what metrics of text compare, and samples for a reader."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hocket.basics import seeding
from hocket.basics.dtensors import mesh_of
from hocket.errors import WrongType, WrongValue
from hocket.loop.modes import eval_mode
from hocket.state.periodic import Periodic
from hocket.state.state import State


class Prompts(NamedTuple):
    """What a causal model continues: tokens, padded on the left, and where they are tokens, int64 ``(B, P)`` each."""

    tokens: Tensor
    mask: Tensor


def prompts_of(tokens: Tensor, mask: Tensor | None, labels: Tensor, padding: int) -> Prompts:
    """Return the tokens of each row that come before its first label: what the labels answer.

    Args:
        tokens: int64 ``(B, L)``.
        mask: 0 at padding, ``(B, L)``; None without padding.
        labels: int64 ``(B, L)``, -100 at the prompt and at padding.
        padding: the token to pad with, on the left.

    Raises:
        ValueError: a row has no token before its first label.
    """
    before = (labels != -100).cumsum(1) == 0
    before = before if mask is None else before & (mask != 0)
    if not before.any(1).all():
        raise WrongValue(
            "There is no prompt to continue: in some row labels count from the first token on. Set the labels of the prompt "
            "to -100, or omit generate= and text_metrics=."
        )
    return left_padded([row[which] for row, which in zip(tokens, before, strict=True)], padding)


def left_padded(rows: Sequence[Tensor], padding: int) -> Prompts:
    """Return rows of tokens of any lengths as prompts, padded with a token on the left."""
    tokens = pad_sequence(list(rows), batch_first=True, padding_value=padding, padding_side="left")
    ones = [torch.ones_like(row) for row in rows]
    return Prompts(tokens, pad_sequence(ones, batch_first=True, padding_side="left"))


def padding_of(tokenizer: Any) -> int:
    """Return the token that pads prompts; masked, so that it does not matter which."""
    tokens = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    found = next((each for each in tokens if each is not None), 0)
    return int(found)


def check_options(model: Any, options: Mapping[str, Any], what: str) -> None:
    """Raise TypeError if the model cannot generate, and ValueError for options with which it would not give one text a row."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not (hasattr(base, "can_generate") and base.can_generate()):
        raise WrongType(
            f"{what} generates text, and {type(base).__name__} cannot: give a causal or an encoder-decoder model."
        )
    if not isinstance(options, Mapping):
        raise WrongType(
            f"{what} is {options!r}. Give arguments of transformers' generate, such as {{'max_new_tokens': 32}}."
        )
    if options.get("num_return_sequences", 1) != 1 or options.get("return_dict_in_generate"):
        raise WrongValue(
            f"{what} gives one text for each row: omit num_return_sequences= and return_dict_in_generate=."
        )


def new_tokens(model: Any, inputs: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any]) -> Tensor:
    """Return the new tokens ``(B, new)`` of a causal model, or all those of a decoder, by transformers' ``generate``."""
    sharded = any(mesh_of(parameter) is not None for parameter in model.parameters())
    common: dict[str, Any] = {"pad_token_id": padding_of(tokenizer), **({"synced_gpus": True} if sharded else {})}
    if "stop_strings" in options:
        common["tokenizer"] = tokenizer
    with torch.no_grad():
        found: Tensor = model.generate(**inputs, **{**common, **options})
    return found if model.config.is_encoder_decoder else found[:, inputs["input_ids"].shape[1] :]


class Generate(Periodic):
    """Generate text from a few prompts at an interval: a table ``generated`` for the loggers, and one line each on stderr.

    The model is a `hocket_nlp.HuggingFaceTask` with a tokenizer. Training is not affected: random numbers and the modes of
    modules are restored.

    Args:
        prompts: texts to continue, or for an encoder-decoder model to answer.
        every: an interval in any unit.
        options: arguments of transformers' ``generate``; without ``max_new_tokens``, 32 tokens.

    Raises:
        TypeError: ``prompts`` is one text; or when a fit begins, the model is no such task, has no tokenizer, or cannot
            generate.
        ValueError: there are no prompts, or an empty one; or options ask for several texts for each.

    Example:
        >>> from hocket_nlp import Generate
        >>> callback = Generate(["def main():"], every="1ep", max_new_tokens=16, do_sample=True)
    """

    def __init__(self, prompts: Sequence[str], every: str = "1ep", **options: Any) -> None:
        super().__init__(every)
        if isinstance(prompts, str):
            raise WrongType(f"Generate was given one text, {prompts!r}; give a list: [{prompts!r}].")
        self._prompts = list(prompts)
        if not self._prompts or not all(self._prompts):
            raise WrongValue(
                f"Generate was given «prompts={self._prompts!r}»; give texts that are not empty, at least one."
            )
        self._options = options if "max_length" in options else {"max_new_tokens": 32, **options}

    def init(self, state: State) -> None:
        """Check that there is a tokenizer."""
        if getattr(state.task, "tokenizer", None) is None or not hasattr(state.task, "generate_options"):
            raise WrongType(
                f"The callback 'generate' needs a tokenizer, and the model is {type(state.task).__name__}. Give the Trainer "
                "model=hocket_nlp.HuggingFaceTask(model, tokenizer)."
            )

        check_options(state.model, self._options, "The callback 'generate'")

    def fit_end(self, state: State) -> None:
        """Generate no further text: the interval says when."""

    def _report(self, state: State) -> None:
        tokenizer: Any = state.task.tokenizer
        rows = [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64) for text in self._prompts]
        prompts = left_padded([row.to(state.device) for row in rows], padding_of(tokenizer))
        task: Any = state.task
        before, task.generate_options = task.generate_options, self._options
        try:
            with seeding.preserved(), eval_mode(state.task):
                state.bus.predict_start(state)  # algorithms that evaluate other weights put them in place
                try:
                    found = state.bus.eval_forward(state, prompts)
                finally:
                    state.bus.predict_end(state)
        finally:
            task.generate_options = before
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        pairs = list(zip(self._prompts, texts, strict=True))
        state.bus.log_table(state, "generated", ["prompt", "text"], [list(pair) for pair in pairs])
        if state.strategy.rank == 0:
            for prompt, text in pairs:
                line = f"{json.dumps(prompt, ensure_ascii=False)} → {json.dumps(text, ensure_ascii=False)}"
                print(f"hocket: after batch {state.timestamp.batch}, {line}", file=sys.stderr, flush=True)
