"""Causes of exceptions in a model and its loss, found by torch's message and the tensors, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hocket_insight.failures import backward, forward, loss
from hocket_insight.failures.shared import ANYWHERE, Cause

#: The causes of each place in the order in which they are tried, each with a pattern of the message.
CAUSES: Mapping[str, Sequence[tuple[str, Cause]]] = {
    place: (*ANYWHERE, *module.CAUSES)
    for place, module in (("forward", forward), ("loss", loss), ("backward", backward))
}
