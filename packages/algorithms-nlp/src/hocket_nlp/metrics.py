"""Metrics of language models: means over the labels that count, whatever the padding and the size of batches."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from hocket.errors import WrongValue
from hocket.state.simple_metrics import Mean

#: The label that does not count, as in transformers.
IGNORED = -100


class TokenCrossEntropy(Mean):
    """The mean cross-entropy of all labels other than -100, in nats.

    Logits are ``(…, vocabulary)``, labels int64 ``(…)``: label i belongs to logits i, so those of a causal language model are
    shifted first. `HuggingFaceTask` does that.

    Example:
        >>> import torch
        >>> from hocket_nlp import TokenCrossEntropy
        >>> metric = TokenCrossEntropy()
        >>> metric.update(torch.zeros(2, 3, 10), torch.tensor([[1, 2, -100], [3, -100, -100]]))
        >>> round(metric.compute(), 4)  # ln(10)
        2.3026
    """

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each label that counts: ``(labels,)``."""
        logits, labels = that_count(outputs, targets)
        return F.cross_entropy(logits.float(), labels, reduction="none")


class Perplexity(TokenCrossEntropy):
    """The exponential of the mean cross-entropy of all labels other than -100. See `TokenCrossEntropy`.

    Example:
        >>> import torch
        >>> from hocket_nlp import Perplexity
        >>> metric = Perplexity()
        >>> metric.update(torch.zeros(2, 3, 10), torch.ones(2, 3, dtype=torch.int64))
        >>> round(metric.compute(), 4)
        10.0
    """

    def compute(self) -> float:
        """Return the perplexity; infinity where the exponential overflows, NaN without any label."""
        mean = super().compute()
        return math.exp(mean) if mean < 709 else mean * math.inf


class MaskedAccuracy(Mean):
    """The fraction of labels other than -100 whose logit is the largest. Shapes as for `TokenCrossEntropy`.

    Labels in floating point, of the shape of the logits, are those of several classes at once: 1 or 0 each, right if the sign
    of the logit says so.

    Example:
        >>> import torch
        >>> from hocket_nlp import MaskedAccuracy
        >>> metric = MaskedAccuracy()
        >>> metric.update(torch.eye(4)[None], torch.tensor([[0, 1, 3, -100]]))
        >>> round(metric.compute(), 4)
        0.6667
    """

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 or 0 for each label that counts: ``(labels,)``."""
        if targets.is_floating_point() and targets.shape == outputs.shape:
            return ((outputs > 0) == (targets > 0.5)).flatten()
        logits, labels = that_count(outputs, targets)
        return logits.argmax(-1) == labels


def that_count(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits ``(N, vocabulary)`` and labels ``(N,)`` of the labels other than -100. Raises ValueError."""
    if logits.shape[:-1] != labels.shape:
        raise WrongValue(
            f"Logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} do not fit: there is one label "
            "for each row of logits, (…, vocabulary) and (…)."
        )
    count = labels != IGNORED
    return logits[count], labels[count].long()
