"""Pack the documents of a padded batch into fewer rows.

Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.errors import WrongType, WrongValue
from hocket_nlp.argument_checks import whole_number


def pack(batch: Any, length: int | None = None, *, causal: bool = True, first_position: int = 0) -> Any:
    """Return a batch with the documents of a padded batch in fewer rows, which keeps them apart.

    Krell et al. 2021 (arXiv 2107.02027): no attention across documents, and positions restart in each. Documents are assigned
    to rows longest first, each to the first row with room. Within a row they keep the order of the batch, and rows are in the
    order of their first documents. So the result depends on the lengths only.

    For causal models of transformers 5 or later, which tell documents apart by their positions, the batch gets
    ``position_ids`` and ``use_cache=False``, without which some would not look at positions, and no ``attention_mask``. The
    first label of each document becomes -100, because a shifted loss would predict it from the document before. With padding
    at the right nothing predicts it in the padded batch either, so loss and gradients are the same. With padding at the left,
    the padded batch predicts first tokens from padding, unless their labels are -100, and learned positions do not begin at 0;
    the packed batch is as if padded at the right.

    For bidirectional models the batch gets a mask of shape ``(rows, 1, length, length)``.

    Args:
        batch: a mapping with ``input_ids`` or ``inputs_embeds``. Its ``attention_mask``, ``(B, L)``, has one block of ones in
            each row, the document; without one, each row is a document of L tokens. Other tensors hold one entry for each
            token, ``(B, L, ...)``. Numbers are passed on.
        length: the length of the packed rows, in tokens; None for that of the longest row, at most L.
        causal: whether the model is causal.
        first_position: the position of a document's first token: 0, or the padding token + 1 for RoBERTa.

    Returns:
        A mapping of the same kind, with tensors ``(rows, length, ...)``. Padding at the end of a row is a document of its own,
        of label -100. The given batch is not changed.

    Raises:
        TypeError: ``batch`` is not a mapping with tokens.
        ValueError: a document is longer than ``length`` or has a hole; the labels of padding are not -100; the batch is packed
            already; or a tensor does not hold one entry for each token.

    Example:
        >>> import torch
        >>> from hocket_nlp.functional import pack
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0], [4, 0, 0]])}
        >>> batch["attention_mask"] = (batch["input_ids"] > 0).long()
        >>> packed = pack(batch)
        >>> packed["input_ids"].tolist(), packed["position_ids"].tolist()
        ([[5, 6, 7], [8, 9, 4]], [[0, 1, 2], [0, 1, 0]])
    """
    tokens = tokens_of(batch)
    length = whole_number("pack", "length", length, 512, optional=True)
    samples, width = tokens.shape[:2]
    starts, lengths = _documents(batch, samples, width)
    capacity = width if length is None else length
    if max(lengths) > capacity:
        raise WrongValue(
            f"A document of {max(lengths)} tokens does not fit into rows of «length={capacity}»: give a length of at least "
            f"{max(lengths)}, or truncate documents when they are tokenized."
        )
    rows = first_fit_decreasing(lengths, capacity)
    if length is None:
        capacity = max(sum(lengths[each] for each in row) for row in rows)
    source, positions, documents = (
        torch.tensor(values, device=tokens.device) for values in _places(rows, starts, lengths, width, capacity)
    )
    padding = documents < 0
    firsts = (positions == 0) & ~padding

    def gather(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if value.shape[:2] != (samples, width):
            raise WrongValue(
                f"{name!r} of shape {tuple(value.shape)} cannot be packed with tokens of shape {(samples, width)}, since it "
                "does not hold one entry for each token: remove it from the batch. Labels of whole sequences cannot be packed."
            )
        moved = value.flatten(0, 1)[source]
        if name == "input_ids":
            return moved  # padding repeats a token, because models warn of padding tokens without a mask
        moved[padding] = -100 if name.endswith("labels") else 0
        if name == "labels" and causal:
            moved[firsts] = -100
        return moved

    packed = {name: gather(name, value) for name, value in batch.items() if name != "attention_mask"}
    packed["position_ids"] = positions + first_position
    if causal:
        packed["use_cache"] = False
    else:
        packed["attention_mask"] = documents[:, None, :, None] == documents[:, None, None, :]
    if type(batch) is dict:
        return packed
    try:
        return type(batch)(packed)  # what else it holds, such as the tokenizer's offsets, is about other rows
    except TypeError:
        return packed


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the documents of each row: the longest document first, each into the first row with room."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        needed = lengths[index]
        if not needed:  # a row of padding
            continue
        at = next((row for row, room in enumerate(free) if needed <= room), len(rows))
        if at == len(rows):
            rows.append([])
            free.append(capacity)
        rows[at].append(index)
        free[at] -= needed
    return sorted(map(sorted, rows))


def tokens_of(batch: Any) -> Tensor:
    """Return the tensor whose first dimensions are those of the tokens."""
    for name in ("input_ids", "inputs_embeds") if isinstance(batch, Mapping) else ():
        if isinstance(found := batch.get(name), Tensor) and found.dim() >= 2:
            return found
    what = f"with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else "is not a mapping"
    raise WrongType(
        f"Packing needs a batch that is a mapping with 'input_ids' of shape (B, L), and this {type(batch).__name__} {what}. "
        "Let the loader give {'input_ids': …, 'attention_mask': …, 'labels': …}."
    )


def _documents(batch: Mapping[str, Any], samples: int, width: int) -> tuple[list[int], list[int]]:
    """Return where the document of each row starts, and its length."""
    if batch.get("position_ids") is not None:
        raise WrongValue(
            "The batch has 'position_ids', so it is packed already, or its positions would be lost: pack it once, and remove "
            "'position_ids' from batches that are not packed."
        )
    mask = batch.get("attention_mask")
    if mask is None:
        return [0] * samples, [width] * samples
    if mask.shape != (samples, width):
        raise WrongValue(
            f"The attention_mask has shape {tuple(mask.shape)}, and packing needs {(samples, width)}: 1 for the tokens of a "
            "document, 0 for padding."
        )
    visible = mask.bool()
    edges = visible[:, 1:] & ~visible[:, :-1]
    blocks = edges.sum(1) + visible[:, 0]
    if (blocks > 1).any():
        raise WrongValue(
            f"Row {int(blocks.argmax())} of the attention_mask has zeros between ones, and packing takes one block of ones for "
            "a document: remove the tokens between, or give each part a row of its own."
        )
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape == mask.shape and (counted := (labels != -100) & ~visible).any():
        raise WrongValue(
            f"{int(counted.sum())} labels of padding are not -100, so the loss counts them, and packing would drop them: set "
            "labels to -100 where attention_mask is 0."
        )
    lengths = visible.sum(1).tolist()
    if not any(lengths):
        raise WrongValue("The attention_mask is 0 everywhere, so there is no document to pack. Check the tokenizer.")
    return visible.int().argmax(1).tolist(), lengths


def _places(
    rows: list[list[int]], starts: list[int], lengths: list[int], width: int, capacity: int
) -> tuple[list[list[int]], ...]:
    """Return, for each place in each row, the index of its token, the position in its document, and the document's number.

    The number of padding is -1, and its token the last one of the row.
    """
    source, positions, documents = [], [], []
    for row in rows:
        from_: list[int] = []
        at: list[int] = []
        number: list[int] = []
        for index in row:
            first, size = index * width + starts[index], lengths[index]
            from_ += range(first, first + size)
            at += range(size)
            number += [index] * size
        rest = capacity - len(at)
        source.append(from_ + from_[-1:] * rest)
        positions.append([*at, *range(rest)])
        documents.append(number + [-1] * rest)
    return source, positions, documents
