"""Causes of exceptions in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from hocket_insight.failures.failure import Failure
from hocket_insight.failures.shared import Cause, float_targets


def _backward_twice(failure: Failure) -> str:
    return (
        "Either a tensor of an earlier batch or step is used again with its graph, such as a hidden state kept on self: write "
        "self.hidden = hidden.detach(), or pass it as carry= and return it as kept=. Or the loss function called backward "
        "itself: return the loss only."
    )


def _in_place(failure: Failure) -> str:
    return "Write x = x + y instead of x += y in the model, and Trainer(detect_anomaly=True) to find the operation."


#: Causes, each with a pattern of torch's message; the first that applies is reported.
CAUSES: Sequence[tuple[str, Cause]] = (
    (r"Found dtype|result type|same dtype", float_targets),
    (r"second time", _backward_twice),
    (r"inplace operation", _in_place),
)
