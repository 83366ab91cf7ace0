"""Guess what a model's own loss is a mean over, by computing the usual losses once more; core asks for models without a task.

A `hocket.Task` returns ``(loss, weight)`` instead; `hocket_nlp.HuggingFaceTask` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.basics.losses import own_loss
from hocket.basics.types import Batch
from hocket.data import nesting
from hocket.state.known_weights import CountedLabels, MeanOver


def of_own_loss(outputs: object, batch: Batch, model: nn.Module) -> MeanOver | CountedLabels | None:
    """Return what the model's own loss is a mean over: the labels that count, if its value is their mean, or samples.

    Models of transformers compute the cross-entropy over the labels other than -100, shifted by one for causal language
    models. Their classes need not be known: the loss is computed once more and compared. None if no reading fits, or several
    do; `MeanOver.NOTHING` if no label counts.
    """
    value = own_loss(outputs)
    # The loss of weights in 16 bits may be rounded to them, and then converted.
    weights = [weight.dtype for weight in islice(model.parameters(), 1) if weight.is_floating_point()]
    tolerance = max(1e-5, *(2 * torch.finfo(dtype).eps for dtype in {value.dtype, *weights}))
    fitting: dict[str | int, list[tuple[str, MeanOver | CountedLabels]]] = {}
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        for key, labels in _labels(batch):
            for name, over, expected in _readings(key, labels, outputs):
                if (value.isnan() or not value) and isinstance(over, CountedLabels) and not over(batch):
                    return MeanOver.NOTHING
                if torch.isclose(expected.double(), value.detach().double(), rtol=tolerance, atol=0.0):
                    fitting.setdefault(key, []).append((name, over))
    if not fitting:
        return None
    # The inputs may fit as labels too, as in language models without padding, so prefer the usual keys.
    readings = dict(fitting[next((key for key in _LABELS if key in fitting), next(iter(fitting)))])
    if len(readings) == 1:
        return next(iter(readings.values()))
    # An untrained model may give all tokens the same probability, which fits both readings.
    kind = str(getattr(model, "loss_type", None) or type(model).__name__)
    if "CausalLM" in kind or "LMHead" in kind:
        return readings.get("shifted")
    return readings.get("plain") if "For" in kind else None


_LABELS = ("labels", "label", "targets", "target")


def _labels(batch: Batch) -> Iterator[tuple[str | int, Tensor]]:
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    for key, value in items:
        if isinstance(value, Tensor) and value.dim():
            yield key, value


def _readings(
    key: str | int, labels: Tensor, outputs: object
) -> Iterator[tuple[str, MeanOver | CountedLabels, Tensor]]:
    """Yield the name, what it is over and the expected value of each possible loss: means over labels or samples."""
    floating: list[Tensor] = []
    nesting.map_tensors(lambda tensor: floating.append(tensor) if tensor.is_floating_point() else None, outputs)
    for logits in floating:
        logits = logits.detach()
        logits = logits if logits.dtype is torch.float64 else logits.float()
        if labels.is_floating_point():
            if logits.numel() == labels.numel():
                for distance in (F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits):
                    yield "samples", MeanOver.SAMPLES, distance(logits.view_as(labels), labels.to(logits))
        elif logits.shape[:-1] == labels.shape:
            yield "plain", CountedLabels(key), _cross_entropy(logits, labels)
            if labels.dim() > 1:
                yield "shifted", CountedLabels(key, shifted=True), _cross_entropy(logits[:, :-1], labels[:, 1:])
        elif logits.dim() > 2 and (logits.shape[0], *logits.shape[2:]) == tuple(labels.shape):
            yield "plain", CountedLabels(key), _cross_entropy(logits.movedim(1, -1), labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels.long()
    outside = ((labels < 0) & (labels != -100)) | (labels >= logits.size(-1))
    if outside.any():  # other integers, not labels
        return torch.tensor(math.nan)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100).cpu()
