"""Rearrange tokens into shorter or longer sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hocket.data.nesting import map_tensors


def scale_sequence_length(batch: Any, scaling: float) -> Any:
    """Reshape every tensor ``(B, L, ...)`` of a batch to ``(B / scaling, L * scaling, ...)``.

    With ``scaling=0.25`` each sequence is split into four, which follow each other in the batch; with ``scaling=2`` two
    neighbours are joined. Tensors share storage where possible; the input batch is not changed.

    Args:
        batch: mappings (dict, BatchEncoding), sequences and dataclasses of tensors. ``B`` and ``L`` are those of
            ``input_ids``, or else of the first tensor with two dimensions or more.
        scaling: a whole number, or one divided by a whole number.

    Raises:
        ValueError: ``scaling`` is another number, ``B`` or ``L`` is not divisible, or the shape of a tensor (labels of full
            sequences, attention masks of pairs) does not begin with ``(B, L)``.

    Example:
        >>> import torch
        >>> from hocket_nlp.functional import scale_sequence_length
        >>> batch = {"input_ids": torch.arange(32).reshape(2, 16)}
        >>> scale_sequence_length(batch, 0.25)["input_ids"].shape
        torch.Size([8, 4])
    """
    merge, split = merge_and_split(scaling)
    if merge == split:
        return batch
    samples, length = _batch_and_length(batch)
    if length % split:
        raise ValueError(
            f"Sequences of {length} tokens cannot be split into {split} of equal length: pad them to a multiple of {split}, "
            f"or choose another scaling than {scaling:g}."
        )
    if samples % merge:
        raise ValueError(
            f"{samples} sequences cannot be joined {merge} by {merge}: use a batch size that is a multiple of {merge}, "
            f"and drop_last=True, or choose another scaling than {scaling:g}."
        )

    def scale(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        if tensor.shape[:2] != (samples, length):
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} cannot follow sequences of shape {(samples, length)} to "
                "another length, since it does not hold one value for each token: use a scaling of 1, or remove it "
                "from the batch."
            )
        return tensor.reshape(samples // merge * split, length // split * merge, *tensor.shape[2:])

    return map_tensors(scale, batch)


def merge_and_split(scaling: float) -> tuple[int, int]:
    """Return how many sequences to join, and how many to split one into; at least one is 1. Raises ValueError."""
    if 0 < scaling < math.inf:
        merge, split = (round(scaling), 1) if scaling >= 1 else (1, round(1 / scaling))
        if math.isclose(scaling, merge / split, rel_tol=1e-6):
            return merge, split
    raise ValueError(
        f"Sequences cannot become {scaling} times as long in equal parts: give a whole number, or one "
        "divided by a whole number, such as 0.25."
    )


def _batch_and_length(batch: Any) -> tuple[int, int]:
    shapes: list[tuple[int, ...]] = []
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    for candidate in (tokens, batch):
        map_tensors(lambda tensor: shapes.append(tuple(tensor.shape)) if tensor.dim() >= 2 else None, candidate)
    if not shapes:
        raise ValueError(
            f"A batch of {type(batch).__name__} holds no tensor of shape (B, L), so it has no sequences to split or "
            "join: use a scaling of 1, or let the loader give token tensors."
        )
    return shapes[0][0], shapes[0][1]
