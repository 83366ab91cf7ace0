"""Composer's wrapper of models of transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.errors import WrongType, WrongValue
from hocket_migration.composer.models.base import ComposerModel
from hocket_migration.composer.plugin_factory import refuse


class HuggingFaceModel(ComposerModel):
    """A model of transformers that computes its loss; batches are mappings of its arguments.

    hocket's own task for these models is `hocket_nlp.HuggingFaceTask`, which weights losses by the labels that count.

    Args:
        model: a model of transformers with a head.
        tokenizer: its tokenizer, whose vocabulary is compared with the model's embeddings.
        use_logits: give metrics the logits, not the full outputs.
        metrics: of torchmetrics, for training, and for evaluation without ``eval_metrics``.
        eval_metrics: for evaluation.
        shift_labels: compare the logits of each position with the label of the next; None for causal models.
        allow_embedding_resizing: enlarge embeddings to the tokenizer's vocabulary instead of raising.

    Raises:
        ValueError: the tokenizer has more tokens than the model has embeddings.

    Example:
        >>> import transformers
        >>> from hocket_migration.composer.models import HuggingFaceModel
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
        >>> HuggingFaceModel(transformers.GPT2LMHeadModel(config)).shift_labels
        True
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        use_logits: bool = False,
        metrics: Sequence[Any] | None = None,
        eval_metrics: Sequence[Any] | None = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: Any = None,
        should_save_peft_only: bool = True,
    ) -> None:
        super().__init__()
        write = "Use hocket_nlp.HuggingFaceTask(model, peft={'r': 8}) with hocket.Trainer, or give peft.get_peft_model(model)."
        refuse(
            "HuggingFaceModel",
            write,
            peft_config=(peft_config, None),
            should_save_peft_only=(should_save_peft_only, True),
        )
        self.model = model
        self.config = model.config
        self.tokenizer = tokenizer
        self.model_forward_args = set(inspect.signature(model.forward).parameters)
        self.use_logits = use_logits
        self.train_metrics = _named(metrics)
        self.val_metrics = copy.deepcopy(self.train_metrics) if eval_metrics is None else _named(eval_metrics)
        causal = type(model).__name__.endswith(("CausalLM", "LMHeadModel"))
        self.shift_labels = causal if shift_labels is None else shift_labels
        if tokenizer is not None and len(tokenizer) > self.config.vocab_size:
            if not allow_embedding_resizing:
                raise WrongValue(
                    f"The tokenizer has {len(tokenizer)} tokens, and {type(model).__name__} embeddings of "
                    f"{self.config.vocab_size}. Write allow_embedding_resizing=True to enlarge them."
                )
            model.resize_token_embeddings(len(tokenizer))

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Call the model with those entries of the batch that it takes."""
        if not isinstance(batch, Mapping):
            raise WrongType(
                f"HuggingFaceModel takes batches that are mappings, such as {{'input_ids': …, 'labels': …}}, and got a "
                f"{type(batch).__name__}. Use transformers' DataCollatorWithPadding as the loader's collate_fn."
            )
        return self.model(**{name: value for name, value in batch.items() if name in self.model_forward_args})

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the model's own loss."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        if loss is None:
            raise WrongValue(f"{type(self.model).__name__} returned no loss: batches need 'labels'.")
        return loss  # type: ignore[no-any-return]  # a tensor

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs, or with ``use_logits`` the logits; those of one class without their last dimension."""
        outputs = self(batch) if outputs is None else outputs
        if not self.use_logits:
            return outputs
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1]
        return logits.squeeze(1) if logits.dim() == 2 and logits.shape[1] == 1 else logits

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        """Return the metrics by the names of their classes."""
        return dict(self.train_metrics if is_train else self.val_metrics)

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Update a metric with outputs and labels, shifted for causal models."""
        labels = batch["labels"]
        if self.use_logits and self.shift_labels:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        metric.update(outputs, labels)

    def generate(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """Generate tokens with the model."""
        if self.tokenizer is not None:
            kwargs.setdefault("pad_token_id", self.tokenizer.pad_token_id)
        return self.model.generate(input_ids, **kwargs)


def _named(metrics: Sequence[Any] | None) -> dict[str, Any]:
    return {type(metric).__name__: metric for metric in metrics or ()}
