"""Rearrange tokens into shorter or longer sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hocket.data.nesting import fields_of, map_tensors
from hocket.errors import WrongValue

#: The label that losses of transformers and torch ignore.
IGNORED = -100


def scale_sequence_length(batch: Any, scaling: float) -> Any:
    """Reshape every tensor ``(B, L, ...)`` of a batch to ``(B / scaling, L * scaling, ...)``.

    With ``scaling=0.25`` each sequence is split into four, which follow each other in the batch; with ``scaling=2`` two
    neighbours are joined. Tensors share storage where possible; the input batch is not changed.

    Args:
        batch: mappings (dict, BatchEncoding), sequences and dataclasses of tensors, nested or not. ``B`` and ``L`` are those
            of ``input_ids``, or else of the first tensor with two dimensions or more.
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
    samples, length = batch_and_length(batch)
    if length % split:
        raise WrongValue(
            f"Sequences of {length} tokens cannot be split into {split} of equal length: pad them to a multiple of {split}, "
            f"or choose another scaling than {scaling:g}."
        )
    if samples % merge:
        raise WrongValue(
            f"{samples} sequences cannot be joined {merge} by {merge}: use a batch size that is a multiple of {merge}, "
            f"and «drop_last=True», or choose another scaling than {scaling:g}."
        )

    def scale(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        _check_follows(tensor, samples, length, "use a scaling of 1")
        return tensor.reshape(samples // merge * split, length // split * merge, *tensor.shape[2:])

    return map_tensors(scale, batch)


def truncate_sequences(batch: Any, length: int, preserve_end_of_sequence: bool = False) -> Any:
    """Keep the first ``length`` tokens of each sequence: ``(B, L, ...) -> (B, length, ...)``.

    Of sequences that are padded on the left, these are the first tokens that ``attention_mask`` shows. All tensors whose
    shape begins with ``(B, L)`` are cut alike. Others are kept, such as one label for each sequence, ``(B,)``. The input batch
    is not changed; a batch of at most ``length`` tokens is returned as it is.

    Args:
        batch: see :func:`scale_sequence_length`. An ``attention_mask``, if there is one, is 0 for padding: ``(B, L)``.
        length: the number of tokens to keep, at least 1.
        preserve_end_of_sequence: let the last token of a longer sequence take the last place that is kept, in all tensors. Its
            label must be at the token's own place, as in transformers, which shifts labels in the model.

    Raises:
        ValueError: ``length`` is not positive; there are no sequences, or of several lengths; or a tensor has a value for
            every pair of tokens, ``(B, ..., L, L)``.

    Example:
        >>> import torch
        >>> from hocket_nlp.functional import truncate_sequences
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 2], [8, 2, 0, 0]])}
        >>> batch["attention_mask"] = (batch["input_ids"] > 0).long()
        >>> truncate_sequences(batch, 2, preserve_end_of_sequence=True)["input_ids"]
        tensor([[5, 2],
                [8, 2]])
    """
    _check_length(length)
    samples, now = batch_and_length(batch)
    if now <= length:
        return batch
    index = _kept(_attention_mask(batch, samples, now), now, length, preserve_end_of_sequence)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] != (samples, now):
            return _without_pairs(tensor, now)
        _without_pairs(tensor, now)
        if index is None:
            return tensor[:, :length].contiguous()
        rows = index.to(tensor.device).expand(samples, length)
        return tensor.gather(1, rows[(..., *[None] * (tensor.dim() - 2))].expand(-1, -1, *tensor.shape[2:]))

    return map_tensors(cut, batch)


def reshape_sequences(batch: Any, length: int) -> tuple[Any, int]:
    """Join all sequences of a batch, and split them into sequences of ``length``: ``(B, L, ...) -> (N, length, ...)``.

    Tokens that ``attention_mask`` hides are removed first. If the batch has both an ``attention_mask`` and ``labels`` of
    shape ``(B, L)``, the last sequence is padded, with 0 in the mask and -100 in the labels, and no token is lost. Otherwise
    the rest, fewer than ``length`` tokens, is dropped. The input batch is not changed; a batch of at most ``length`` tokens
    is returned as it is.

    Args:
        batch: see :func:`scale_sequence_length`.
        length: the number of tokens of the new sequences, at least 1.

    Returns:
        The new batch, and the number of tokens that were dropped.

    Raises:
        ValueError: ``length`` is not positive; there are no sequences, or of several lengths; or the shape of a tensor does not
            begin with ``(B, L)``.

    Example:
        >>> import torch
        >>> from hocket_nlp.functional import reshape_sequences
        >>> batch, dropped = reshape_sequences({"input_ids": torch.arange(24).reshape(2, 12)}, 7)
        >>> batch["input_ids"].shape, dropped
        (torch.Size([3, 7]), 3)
    """
    _check_length(length)
    samples, now = batch_and_length(batch)
    if now <= length:
        return batch, 0
    mask = _attention_mask(batch, samples, now)
    shown = None if mask is None else mask.flatten().nonzero()[:, 0]
    tokens = samples * now if shown is None else len(shown)
    if not tokens:
        return batch, 0
    labels = [each for each in tensors_named(batch, "labels") if each.shape == (samples, now)]
    pads = mask is not None and bool(labels)
    padding = -tokens % length if pads or tokens < length else 0
    rest = 0 if padding else tokens % length

    def reshape(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        _check_follows(tensor, samples, now, "truncate them instead (truncate=True)")
        _without_pairs(tensor, now)
        flat = tensor.flatten(0, 1)
        if shown is not None:
            flat = flat[shown.to(flat.device)]
        flat = flat[: tokens - rest]
        if padding:
            value = IGNORED if any(tensor is each for each in labels) else 0
            flat = F.pad(flat, [*[0, 0] * (flat.dim() - 1), 0, padding], value=value)
        return flat.reshape(-1, length, *tensor.shape[2:])

    return map_tensors(reshape, batch), rest


def merge_and_split(scaling: float) -> tuple[int, int]:
    """Return how many sequences to join, and how many to split one into; at least one is 1. Raises ValueError."""
    if isinstance(scaling, Real) and not isinstance(scaling, bool) and 0 < scaling < math.inf:
        merge, split = (round(scaling), 1) if scaling >= 1 else (1, round(1 / scaling))
        if math.isclose(scaling, merge / split, rel_tol=1e-6):
            return merge, split
    raise WrongValue(
        f"Sequences cannot become {scaling!r} times as long in equal parts: give a whole number, or one "
        "divided by a whole number, such as 0.25."
    )


def batch_and_length(batch: Any) -> tuple[int, int]:
    """Return ``(B, L)`` of the sequences in a batch. Raises ValueError if there are none, or sequences of several lengths."""
    shapes = list(dict.fromkeys(tuple(each.shape) for each in tensors_named(batch, "input_ids")))
    if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
        raise WrongValue(
            f"A batch holds input_ids of {' and '.join(map(str, shapes))}, and sequences of one batch must have one shape "
            "(B, L) to change their length together: change the length in the data's collate function instead."
        )
    if not shapes:
        map_tensors(lambda tensor: shapes.append(tuple(tensor.shape)) if tensor.dim() >= 2 else None, batch)
    if not shapes:
        raise WrongValue(
            f"A batch of {type(batch).__name__} holds no tensor of shape (B, L), so it has no sequences whose length could "
            "change: remove the algorithm, or let the loader give token tensors."
        )
    return shapes[0][0], shapes[0][1]


def tensors_named(batch: Any, name: str) -> Iterator[Tensor]:
    """Return all tensors of this key or attribute, at any depth of mappings, sequences and objects with fields."""
    fields = batch if isinstance(batch, Mapping) else fields_of(batch)
    if fields is None:
        for item in batch if isinstance(batch, list | tuple) else ():
            yield from tensors_named(item, name)
        return
    for key, item in fields.items():
        if key == name and isinstance(item, Tensor):
            yield item
        else:
            yield from tensors_named(item, name)


def _attention_mask(batch: Any, samples: int, length: int) -> Tensor | None:
    """Return the mask of the sequences, or None if all tokens count."""
    return next((each for each in tensors_named(batch, "attention_mask") if each.shape == (samples, length)), None)


def _kept(mask: Tensor | None, now: int, length: int, preserve_end: bool) -> Tensor | None:
    """Return the positions of the tokens to keep, ``(B, length)`` or ``(1, length)``; None for the first ones.

    Computed without a look at the mask's values, because it may be on a device.
    """
    if mask is None:
        index = torch.arange(length)[None]
        last: Tensor | int = now - 1
        if not preserve_end:
            return None
    else:
        shown = (mask != 0).long()
        first = shown.argmax(1, keepdim=True)
        last = now - 1 - shown.flip(1).argmax(1, keepdim=True)
        # Sequences that are shorter than `length` and padded on the left keep some of the padding.
        index = first.clamp(max=now - length) + torch.arange(length, device=mask.device)
    if preserve_end:
        index = torch.cat([index[:, :-1], index[:, -1:].clamp(min=last)], 1)
    return index


def _check_length(length: int) -> None:
    if not isinstance(length, int) or length < 1:
        raise WrongValue(f"length is {length!r}, but it is a number of tokens: give a whole number, at least 1.")


def _check_follows(tensor: Tensor, samples: int, length: int, instead: str) -> None:
    if tensor.shape[:2] != (samples, length):
        raise WrongValue(
            f"A tensor of shape {tuple(tensor.shape)} cannot follow sequences of shape {(samples, length)} to "
            f"another length, since it does not hold one value for each token: {instead}, or remove it "
            "from the batch."
        )


def _without_pairs(tensor: Tensor, length: int) -> Tensor:
    """Return a tensor that does not hold one value for each pair of tokens. Raises ValueError for others."""
    if tensor.dim() > 2 and tensor.shape[-2:] == (length, length):
        raise WrongValue(
            f"A tensor of shape {tuple(tensor.shape)} seems to hold a value for every pair of {length} tokens, such as an "
            "attention mask of pairs, and cannot follow sequences to another length: give a mask of shape (B, L), and make "
            "masks of pairs in the model."
        )
    return tensor
