"""Train models of transformers: batches by name, losses weighted by the labels that count, metrics over them."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from hocket.basics.losses import own_loss
from hocket.data import batches
from hocket.data.batches import Counts
from hocket.errors import WrongType, WrongValue
from hocket.state.known_weights import CountedLabels, MeanOver
from hocket.state.task import SupervisedTask
from hocket_nlp.adapters import AdapterSettings, check_targets, with_adapters
from hocket_nlp.generation import Prompts, check_options, new_tokens, padding_of, prompts_of
from hocket_nlp.huggingface_checks import check_tokenizer, transformers_model, without_loss
from hocket_nlp.metrics import MaskedAccuracy, Perplexity, that_count
from hocket_nlp.own_losses import of_own_loss
from hocket_nlp.pretrained import save_pretrained

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.state.state import State

#: Arguments of models that compute a loss.
_LABELS = {"labels", "start_positions", "next_sentence_label"}
# Names of classes, the bases included.
_CAUSAL = re.compile("CausalLM|LMHead|DoubleHeads")
_LANGUAGE = re.compile("CausalLM|LMHead|DoubleHeads|MaskedLM|ForConditionalGeneration|EncoderDecoderModel")
_CLASSES = re.compile("For(Sequence|Token|Image|Audio|Video)Classification|ForMultipleChoice|ForNextSentencePrediction")
#: Entries of a batch that are not what a model generates from.
_NOT_INPUTS = {"labels", "decoder_input_ids", "decoder_attention_mask", "token_type_ids", "position_ids", "use_cache"}


class HuggingFaceTask(SupervisedTask):
    """A model of transformers with a head: causal, masked, sequence-to-sequence, classification and others.

    Batches are mappings (dict, BatchEncoding) of tensors with samples in dimension 0, such as ``input_ids``,
    ``attention_mask`` and ``labels``, int64 ``(B, L)``. The loss is the model's own: a mean over the labels other than -100.
    It is weighted by their number (for causal models without the first of each row, which no position predicts), so that the
    gradient depends neither on microbatches nor on the number of ranks, nor on padding.

    A causal model that gets no ``labels`` learns to predict ``input_ids`` where ``attention_mask`` is not 0. Entries that the
    model's ``forward`` does not take are omitted. Both are said in one line.

    Durations in tokens count tokens that are not padding. Language models are evaluated with ``perplexity`` and ``accuracy``
    over labels, classifiers with ``accuracy``; metrics of ``metrics=`` get the logits ``(N, V)`` and labels ``(N,)``
    that count, already shifted.

    Args:
        model: a transformers model (5 or later) with a loss.
        tokenizer: its tokenizer, whose vocabulary is compared with the model's embeddings.
        peft: train adapters and freeze the model: arguments of ``peft.LoraConfig``, such as ``{"r": 8}``, or a configuration of
            peft. Checkpoints and `save_pretrained` then hold the adapters alone. A model that has adapters is taken as it is.
        generate: generate in evaluation and prediction, with these arguments of transformers' ``generate``, such as
            ``{"max_new_tokens": 32}``: outputs get ``generated`` tokens. A causal model continues the tokens before the first
            label of each row.
        text_metrics: metrics by name of the generated texts and those of the labels, such as ``{"rouge": ROUGEScore()}`` of
            torchmetrics. They are copied for each evaluation set.

    Raises:
        TypeError: the model has no loss, such as one without a head; ``peft`` is no configuration.
        ValueError: the tokenizer has more tokens than the model has embeddings; there is none for ``text_metrics``; adapters
            are on projections of QK norm or gated linear units.
        ImportError: peft is not installed.

    Example:
        >>> import hocket, hocket_nlp, torch, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
        >>> task = hocket_nlp.HuggingFaceTask(transformers.GPT2LMHeadModel(config))
        >>> tokens = torch.arange(64).reshape(4, 16) % 16
        >>> batch = {"input_ids": tokens, "labels": tokens}
        >>> trainer = hocket.Trainer(
        ...     model=task, train_data=[batch], optimizer="adamw(lr=1e-3)", microbatch=3, duration="1ep", device="cpu"
        ... )
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        peft: Any = None,
        generate: Mapping[str, Any] | None = None,
        text_metrics: Mapping[str, Any] | None = None,
    ) -> None:
        base = transformers_model(model)
        kind, taken = type(base).__name__, frozenset(inspect.signature(base.forward).parameters)
        if not taken & _LABELS:
            raise WrongType(
                f"HuggingFaceTask trains models of transformers that compute a loss from labels, and {kind}.forward takes "
                f"none. Give a model with a head, such as {kind.removesuffix('Model')}ForSequenceClassification; for another "
                "module give the Trainer «model=» and «loss=»."
            )
        if tokenizer is not None:
            check_tokenizer(base, tokenizer)
        if text_metrics and tokenizer is None:
            raise WrongValue("text_metrics= compare texts, and there is no tokenizer to decode them. Pass tokenizer=.")
        if text_metrics is not None and not isinstance(text_metrics, Mapping):
            raise WrongType(f"«text_metrics={text_metrics!r}» is not a mapping. Write {{'name': metric}}.")
        if peft is None:
            check_targets(model)
        super().__init__(model if peft is None else with_adapters(model, peft), None)
        if not any(module.training for module in self.network.modules()):
            self.network.train()  # as from_pretrained returned it
        if peft is not None or base is not model:
            self.checkpoints_only = "trainable"
        self.tokenizer = tokenizer
        #: Arguments of transformers' ``generate`` for evaluation and prediction; None to generate nothing.
        self.generate_options = generate if generate is not None or not text_metrics else {}
        if self.generate_options is not None:
            check_options(base, self.generate_options, "generate=")
        self._text_metrics = {
            name: each() if isinstance(each, type) else each for name, each in (text_metrics or {}).items()
        }
        self._kind, self._taken = kind, taken
        self._kinds = " ".join(each.__name__ for each in type(base).__mro__)
        self._config = getattr(base, "config", None)
        self._encoder_decoder = bool(getattr(self._config, "is_encoder_decoder", False))
        self._causal = bool(_CAUSAL.search(self._kinds)) and not self._encoder_decoder
        #: What the model's loss is a mean over, once the first one has shown it; None if that is not labels, or not certain.
        self._counted: CountedLabels | None = None
        self._seen = False
        self._said: set[str] = set()

    def forward(self, batch: Batch) -> Any:
        """Return the model's outputs for a batch, with its loss where there are labels."""
        return self.network(**self._arguments(batch))

    def loss(self, outputs: Any, batch: Batch) -> Any:
        """Return the model's own loss, and the number of labels that it is a mean over."""
        value = own_loss(outputs)
        if value is None:
            raise WrongValue(without_loss(self._kind, batch))
        given = batch if isinstance(batch, Mapping) else {}
        if "start_positions" in given and "start_logits" in outputs:
            return value, _answers(batch, outputs["start_logits"].shape[1])
        counted = self._labels(outputs, batch)
        if counted is None:
            return value
        if "labels" not in given and not counted.shifted:
            raise WrongValue(
                f"The batch has no 'labels', and {self._kind} compares each position with its own label, so that it would "
                "learn to repeat 'input_ids'. Add labels of the next tokens: input_ids[:, 1:], and -100 at the end."
            )
        return value, counted(self.with_labels(batch))

    def eval_forward(self, batch: Batch | Prompts) -> Any:
        """Return the outputs for a batch, with ``generated`` tokens if ``generate=`` asks for them; for prompts these alone."""
        options = self.generate_options
        if isinstance(batch, Prompts):
            prompts = {"input_ids": batch.tokens, "attention_mask": batch.mask}
            return new_tokens(self.network, prompts, self.tokenizer, options or {})
        if options is None:
            return self(batch)
        # Before the forward pass, after which sharded parameters are no longer gathered.
        generated = new_tokens(self.network, self._inputs_of(batch), self.tokenizer, options)
        outputs = self(batch)
        outputs["generated"] = generated
        return outputs

    def metrics(self, split: str) -> Mapping[str, Any]:
        """Return perplexity and accuracy for the evaluation of a language model, accuracy for that of a classifier."""
        if split == "train":
            return {}
        found: dict[str, Any] = copy.deepcopy(self._text_metrics)
        for metric in found.values():
            metric._of_texts = True
        numbers = (
            getattr(self._config, "problem_type", None) == "regression" or getattr(self._config, "num_labels", 2) == 1
        )
        if _LANGUAGE.search(self._kinds):
            found |= {"perplexity": Perplexity(), "accuracy": MaskedAccuracy()}
        elif _CLASSES.search(self._kinds) and not numbers:
            found["accuracy"] = MaskedAccuracy()
        return found

    def update_metric(self, metric: Any, outputs: Any, batch: Batch) -> None:
        """Call ``metric.update(logits, labels)`` with the labels that count: ``(N, V)`` and ``(N,)``, shifted if causal.

        Those of ``text_metrics=`` get the generated texts and the texts of the labels, lists of ``B``. Labels that belong to
        no logits of their own, such as numbers, are passed on as they are.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if getattr(metric, "_of_texts", False):
            if labels is None:
                raise WrongValue(
                    "text_metrics= compare generated texts with those of 'labels', and the batch has none."
                )
            metric.update(self._decoded(outputs["generated"]), self._decoded(labels))
            return
        logits = _logits(outputs)
        counted = self._labels(outputs, batch) or CountedLabels("labels", shifted=self._causal)
        labels = self.with_labels(batch).get("labels")
        if logits is None or labels is None or labels.is_floating_point() or logits.dim() != labels.dim() + 1:
            super().update_metric(metric, outputs, batch)
            return
        logits = logits[:, -labels.shape[1] :] if labels.dim() > 1 else logits  # without virtual tokens of a prompt
        logits = logits[:, :-1] if counted.shifted else logits
        metric.update(*that_count(logits, labels[:, 1:] if counted.shifted else labels))

    def count(self, batch: Batch) -> int | Counts:
        """Return the number of samples, and of tokens that are not padding."""
        counts = batches.count(batch)
        _check_answers(batch)
        mask, tokens = (
            batch.get(name) if isinstance(batch, Mapping) else None for name in ("attention_mask", "input_ids")
        )
        if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.shape != tokens.shape:
            return counts
        return Counts(counts.samples, int((mask != 0).sum()))

    def checkpoint_components(self, state: State) -> list[AdapterSettings]:
        """Return the configurations of adapters, of whose changes a resumed run warns."""
        configurations = getattr(self.network, "peft_config", None)
        return [AdapterSettings(configurations)] if configurations else []

    def save_pretrained(self, folder: Path | str, weights: Mapping[str, Tensor] | None = None) -> Path:
        """Write a Hugging Face folder: weights, configuration and tokenizer, or the adapters alone. Return its path.

        Args:
            folder: replaced if it exists.
            weights: those of ``trainer.model_state_dict()``, which gathers them on all ranks, if a strategy shards parameters.
        """
        return save_pretrained(self.network, self.tokenizer, folder, weights)

    def _inputs_of(self, batch: Batch) -> dict[str, Any]:
        """Return what to generate from: for a causal model the tokens before the first label of each row."""
        inputs = {name: value for name, value in batch.items() if name in self._taken - _NOT_INPUTS}
        if self._encoder_decoder or "labels" not in batch:
            return inputs
        if others := sorted(inputs.keys() - {"input_ids", "attention_mask"}):
            raise WrongValue(
                f"generate= continues the tokens before the labels, and the batch has {', '.join(map(repr, others))}, "
                "whose parts for these tokens are not known. Omit generate=, or generate from batches without 'labels'."
            )
        prompts = prompts_of(
            batch["input_ids"], batch.get("attention_mask"), batch["labels"], padding_of(self.tokenizer)
        )
        return {"input_ids": prompts.tokens, "attention_mask": prompts.mask}

    def _decoded(self, tokens: Tensor) -> list[str]:
        return [self.tokenizer.decode(row[row >= 0], skip_special_tokens=True) for row in tokens]

    def _labels(self, outputs: Any, batch: Batch) -> CountedLabels | None:
        """Return the labels that the loss is a mean over; None if that is not certain, or if it is over samples."""
        if not self._seen and own_loss(outputs) is not None:
            if _logits(outputs) is None and self._causal:
                return CountedLabels("labels", shifted=True)  # a fused loss, which makes no logits
            mean_over = of_own_loss(outputs, self.with_labels(batch), self.network)
            self._seen = mean_over is not MeanOver.NOTHING
            self._counted = mean_over if isinstance(mean_over, CountedLabels) else None
        return self._counted

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        if not isinstance(batch, Mapping):
            if not isinstance(batch, Tensor):
                raise WrongType(
                    f"HuggingFaceTask got a batch of {type(batch).__name__}. It takes mappings by the names of the model's "
                    "arguments, such as {'input_ids': …, 'attention_mask': …, 'labels': …}; let the data set return dicts."
                )
            batch = {"input_ids": batch}
        if omitted := [name for name in batch if name not in self._taken]:
            self._say(f"batches have {', '.join(map(repr, omitted))}, which {self._kind} does not take; omitted.")
        arguments = {name: value for name, value in self.with_labels(batch).items() if name in self._taken}
        if "use_cache" in self._taken:  # keys and values of past tokens are for generation
            arguments.setdefault("use_cache", False)
        return arguments

    def with_labels(self, batch: Batch) -> Any:
        """Return a batch with labels, those of its tokens if it has none and the model is causal."""
        if isinstance(batch, Tensor):
            batch = {"input_ids": batch}
        tokens = batch.get("input_ids")
        if "labels" in batch or tokens is None or not self._causal:
            return batch
        self._say(
            f"batches have no 'labels'; those of {self._kind} are 'input_ids', of which it predicts the next one."
        )
        mask = batch.get("attention_mask")
        padded = mask is not None and mask.shape == tokens.shape
        return {**batch, "labels": tokens.masked_fill(mask == 0, -100) if padded else tokens}

    def _say(self, text: str) -> None:
        """Print a line once, on rank 0."""
        if text not in self._said:
            self._said.add(text)
            if dist.is_initialized() and dist.get_rank():
                return
            print(f"hocket: {text}", file=sys.stderr, flush=True)


def _check_answers(batch: Batch) -> None:
    """Raise ValueError for an answer of which only one end is in the text: two means over different numbers have no weight."""
    names = ("start_positions", "end_positions", "input_ids")
    given: list[Any] = [batch.get(name) if isinstance(batch, Mapping) else None for name in names]
    if not all(isinstance(each, Tensor) and each.device.type == "cpu" for each in given):
        return  # looking at tensors of a device would wait for it
    *ends, tokens = given
    start, end = (each < tokens.shape[1] for each in ends)
    if start.shape == end.shape and (start != end).any():
        row = int((start != end).flatten().nonzero()[0])
        raise WrongValue(
            f"Row {row} of a batch has an answer from {int(ends[0].flatten()[row])} to {int(ends[1].flatten()[row])}, of which "
            f"one end is outside of the {tokens.shape[1]} tokens. The model would ignore that end only, and the gradient would "
            f"depend on how batches are divided. Set both positions to {tokens.shape[1]} to ignore the answer, or both to 0."
        )


def _answers(batch: Mapping[str, Any], length: int) -> Tensor:
    """Return the number of answers of a batch of questions: those whose positions are in the text."""
    return sum((batch[name] < length).sum() for name in ("start_positions", "end_positions")) / 2  # type: ignore[return-value]


def _logits(outputs: Any) -> Tensor | None:
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) else None
