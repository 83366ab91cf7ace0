"""The same tokens in shorter or longer sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hocket.data.batches import map_tensors


def scale_sequence_length(batch: Any, scaling: float) -> Any:
    """Every tensor ``(B, L, ...)`` of a batch as ``(B / scaling, L * scaling, ...)``.

    With ``scaling=0.25`` each sequence is cut into four, which follow each other in the batch; with ``scaling=2`` two
    neighbours become one. Tensors share their storage where they can; the batch that was given is not changed.

    Args:
        batch: mappings (dict, BatchEncoding), sequences and dataclasses of tensors. ``B`` and ``L`` are those of
            ``input_ids``, or else of the first tensor with two dimensions or more.
        scaling: a whole number, or one divided by a whole number.

    Raises:
        ValueError: ``scaling`` is something else, ``B`` or ``L`` is not divisible, or a tensor (labels of whole
            sequences, attention masks of pairs) does not begin with ``(B, L)``.

    Example:
        >>> import torch
        >>> from hocket_nlp.functional import scale_sequence_length
        >>> batch = {"input_ids": torch.arange(32).reshape(2, 16)}
        >>> scale_sequence_length(batch, 0.25)["input_ids"].shape
        torch.Size([8, 4])
    """
    merge, cut = merge_and_cut(scaling)
    if merge == cut:
        return batch
    samples, length = _batch_and_length(batch)
    if length % cut:
        raise ValueError(
            f"Sequences of {length} tokens cannot be cut into {cut} of equal length: pad them to a multiple of {cut}, "
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
                "another length, since it does not hold one value for each token: use a scaling of 1, or leave it out "
                "of the batch."
            )
        return tensor.reshape(samples // merge * cut, length // cut * merge, *tensor.shape[2:])

    return map_tensors(scale, batch)


def merge_and_cut(scaling: float) -> tuple[int, int]:
    """How many sequences become one, and into how many one is cut; at least one of the two is 1. Raises ValueError."""
    if 0 < scaling < math.inf:
        merge, cut = (round(scaling), 1) if scaling >= 1 else (1, round(1 / scaling))
        if math.isclose(scaling, merge / cut, rel_tol=1e-6):
            return merge, cut
    raise ValueError(
        f"Sequences cannot become {scaling} times as long without cutting across them: give a whole number, or one "
        "divided by a whole number, such as 0.25."
    )


def _batch_and_length(batch: Any) -> tuple[int, int]:
    shapes: list[tuple[int, ...]] = []
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    for candidate in (tokens, batch):
        map_tensors(lambda tensor: shapes.append(tuple(tensor.shape)) if tensor.dim() >= 2 else None, candidate)
    if not shapes:
        raise ValueError(
            f"A batch of {type(batch).__name__} holds no tensor of shape (B, L), so it has no sequences to cut or "
            "join: use a scaling of 1, or let the loader give token tensors."
        )
    return shapes[0][0], shapes[0][1]
