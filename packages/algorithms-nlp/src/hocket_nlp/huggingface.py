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

from hocket.data import batches
from hocket.data.batches import Counts
from hocket.losses import own_loss
from hocket.task import SupervisedTask
from hocket.training import weights
from hocket.training.weights import CountedLabels
from hocket_nlp.adapters import with_adapters
from hocket_nlp.generation import Prompts, new_tokens, padding_of, prompts_of
from hocket_nlp.metrics import MaskedAccuracy, Perplexity, TokenCrossEntropy
from hocket_nlp.pretrained import save_pretrained

if TYPE_CHECKING:
    from hocket.types import Batch

#: Arguments of models that compute a loss.
_LABELS = {"labels", "start_positions", "next_sentence_label"}
_CAUSAL = re.compile("CausalLM|LMHead|DoubleHeads")
_LANGUAGE = re.compile("CausalLM|LMHead|DoubleHeads|MaskedLM|ForConditionalGeneration|ForPreTraining")
_CLASSES = re.compile("For(Sequence|Token|Image|Audio|Video)Classification|ForMultipleChoice|ForNextSentencePrediction")


class HuggingFaceTask(SupervisedTask):
    """A model of transformers with a head: causal, masked, sequence-to-sequence, classification and others.

    Batches are mappings (dict, BatchEncoding) of tensors with samples in dimension 0, such as ``input_ids``,
    ``attention_mask`` and ``labels``, int64 ``(B, L)``. The loss is the model's own: a mean over the labels other than -100.
    It is weighted by their number (for causal models without the first of each row, which no position predicts), so that the
    gradient depends neither on microbatches nor on the number of ranks, nor on padding.

    A causal model that gets no ``labels`` learns to predict ``input_ids`` where ``attention_mask`` is not 0. Entries that the
    model's ``forward`` does not take are omitted. Both are said in one line.

    Durations in tokens count tokens that are not padding. Language models are evaluated with ``perplexity`` and ``accuracy``
    over labels, classifiers with ``accuracy``; metrics of ``metrics=`` get logits and labels, already shifted.

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
        ValueError: the tokenizer has more tokens than the model has embeddings; there is none for ``text_metrics``.
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
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside of an adapter of peft
        kind, taken = type(base).__name__, frozenset(inspect.signature(base.forward).parameters)
        if not taken & _LABELS:
            raise TypeError(
                f"HuggingFaceTask trains models of transformers that compute a loss from labels, and {kind}.forward takes "
                f"none. Give a model with a head, such as {kind.removesuffix('Model')}ForSequenceClassification; for another "
                "module give the Trainer model= and loss=."
            )
        if text_metrics and tokenizer is None:
            raise ValueError("text_metrics= compare texts, and there is no tokenizer to decode them. Pass tokenizer=.")
        super().__init__(model if peft is None else with_adapters(model, peft), None)
        if peft is not None or base is not model:
            self.checkpoints_only = "trainable"
        self.tokenizer = tokenizer
        #: Arguments of transformers' ``generate`` for evaluation and prediction; None to generate nothing.
        self.generate_options = generate if generate is not None or not text_metrics else {}
        self._text_metrics = dict(text_metrics or {})
        #: The copies of these that evaluation sets have.
        self._of_texts: list[Any] = []
        self._kind, self._taken = kind, taken
        self._encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        #: What the model's loss is a mean over, once the first one has shown it; None if that is not labels, or not certain.
        self._counted: CountedLabels | None = None
        self._seen = False
        self._said: set[str] = set()
        if tokenizer is not None:
            self._check_tokenizer(model, tokenizer)

    def forward(self, batch: Batch) -> Any:
        """Return the model's outputs for a batch, with its loss where there are labels."""
        return self.network(**self._arguments(batch))

    def loss(self, outputs: Any, batch: Batch) -> Any:
        """Return the model's own loss, and the number of labels that it is a mean over."""
        value = own_loss(outputs)
        if value is None:
            given = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ValueError(
                f"{self._kind} computed no loss: the batch has {given}, and no labels. Add 'labels' to the samples, or collate "
                "them with transformers.DataCollatorForLanguageModeling, DataCollatorForSeq2Seq or DataCollatorWithPadding."
            )
        counted = self._labels(outputs, batch)
        return value if counted is None else (value, counted(self._with_labels(batch)))

    def eval_forward(self, batch: Batch | Prompts) -> Any:
        """Return the outputs for a batch, with ``generated`` tokens if ``generate=`` asks for them; for prompts these alone."""
        padding = 0 if self.tokenizer is None else padding_of(self.tokenizer)
        options = dict(self.generate_options or {})
        if isinstance(batch, Prompts):
            return new_tokens(self.network, batch.tokens, batch.mask, padding, options)
        if self.generate_options is None:
            return self(batch)
        tokens, mask = batch["input_ids"], batch.get("attention_mask")
        if not self._encoder_decoder and "labels" in batch:
            tokens, mask = prompts_of(tokens, mask, batch["labels"], padding)
        # Before the forward pass, after which sharded parameters are no longer gathered.
        generated = new_tokens(self.network, tokens, mask, padding, options)
        outputs = self(batch)
        outputs["generated"] = generated
        return outputs

    def metrics(self, split: str) -> Mapping[str, Any]:
        """Return perplexity and accuracy for the evaluation of a language model, accuracy for that of a classifier."""
        if split == "train":
            return {}
        texts = copy.deepcopy(self._text_metrics)
        self._of_texts += texts.values()
        if _LANGUAGE.search(self._kind):
            return {"perplexity": Perplexity(), "accuracy": MaskedAccuracy(), **texts}
        return {"accuracy": MaskedAccuracy(), **texts} if _CLASSES.search(self._kind) else texts

    def update_metric(self, metric: Any, outputs: Any, batch: Batch) -> None:
        """Call ``metric.update(logits, labels)``: ``(B, L, V)`` or ``(B, C)``, and the label of each, shifted if causal.

        Those of ``text_metrics=`` get the generated texts and the texts of the labels, lists of ``B``.
        """
        if any(metric is each for each in self._of_texts):
            metric.update(self._decoded(outputs["generated"]), self._decoded(batch["labels"]))
            return
        counted = self._labels(outputs, batch)
        if counted is None:
            super().update_metric(metric, outputs, batch)
            return
        batch = self._with_labels(batch)
        if isinstance(metric, TokenCrossEntropy) and own_loss(outputs) is not None:
            metric.update_mean(own_loss(outputs), counted(batch))
            return
        logits = outputs.logits if hasattr(outputs, "logits") else outputs["logits"]
        metric.update(logits[:, :-1] if counted.shifted else logits, counted.of(batch))

    def count(self, batch: Batch) -> int | Counts:
        """Return the number of samples, and of tokens that are not padding."""
        counts = batches.count(batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return counts
        return Counts(counts.samples, int((mask != 0).sum()))

    def save_pretrained(self, folder: Path | str, weights: Mapping[str, Tensor] | None = None) -> Path:
        """Write a Hugging Face folder: weights, configuration and tokenizer, or the adapters alone. Return its path.

        Args:
            folder: replaced if it exists.
            weights: those of ``trainer.model_state_dict()``, which gathers them on all ranks, if a strategy shards parameters.
        """
        return save_pretrained(self.network, self.tokenizer, folder, weights)

    def _decoded(self, tokens: Tensor) -> list[str]:
        tokens = tokens.where(tokens >= 0, padding_of(self.tokenizer))
        texts: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts

    def _labels(self, outputs: Any, batch: Batch) -> CountedLabels | None:
        """Return the labels that the loss is a mean over; None if that is not certain, or if it is over samples."""
        if not self._seen and own_loss(outputs) is not None:
            if _logits(outputs) is None and _CAUSAL.search(self._kind):
                return CountedLabels("labels", shifted=True)  # a fused loss, which makes no logits
            found = weights.of_own_loss(outputs, self._with_labels(batch), self.network)
            self._seen = found is not weights.nothing
            self._counted = found if isinstance(found, CountedLabels) else None
        return self._counted

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        if not isinstance(batch, Mapping):
            if not isinstance(batch, Tensor):
                raise TypeError(
                    f"HuggingFaceTask got a batch of {type(batch).__name__}. It takes mappings by the names of the model's "
                    "arguments, such as {'input_ids': …, 'attention_mask': …, 'labels': …}; let the data set return dicts."
                )
            batch = {"input_ids": batch}
        if omitted := [name for name in batch if name not in self._taken]:
            self._say(f"batches have {', '.join(map(repr, omitted))}, which {self._kind} does not take; omitted.")
        arguments = {name: value for name, value in self._with_labels(batch).items() if name in self._taken}
        if "use_cache" in self._taken:  # keys and values of past tokens are for generation
            arguments.setdefault("use_cache", False)
        return arguments

    def _with_labels(self, batch: Batch) -> Any:
        """Return a batch with labels, if it has none and the model is causal."""
        if isinstance(batch, Tensor):
            batch = {"input_ids": batch}
        tokens = batch.get("input_ids")
        if "labels" in batch or tokens is None or self._encoder_decoder or not _CAUSAL.search(self._kind):
            return batch
        self._say(
            f"batches have no 'labels'; those of {self._kind} are 'input_ids', of which it predicts the next one."
        )
        mask = batch.get("attention_mask")
        return {**batch, "labels": tokens if mask is None else tokens.masked_fill(mask == 0, -100)}

    def _say(self, text: str) -> None:
        """Print a line once, on rank 0."""
        if text not in self._said:
            self._said.add(text)
            if dist.is_initialized() and dist.get_rank():
                return
            print(f"hocket: {text}", file=sys.stderr, flush=True)

    def _check_tokenizer(self, model: Any, tokenizer: Any) -> None:
        rows = model.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > rows:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens, and {self._kind} has embeddings for {rows}: larger ones would be "
                "out of range. Call model.resize_token_embeddings(len(tokenizer)) first, or give the model's own tokenizer."
            )


def _logits(outputs: Any) -> Tensor | None:
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) else None
