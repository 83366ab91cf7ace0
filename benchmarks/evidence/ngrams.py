"""Reference points of the text task: what tables of n-grams reach, counted in the same training windows.

The n-th character is predicted from the n - 1 before it. Counts are smoothed with the table of one character less:
``(count + a · p) / (sum of counts + a)``, with the ``a`` of `PSEUDO_COUNTS` that is best on validation data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from evidence.tasks import Part

PSEUDO_COUNTS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}


def references(parts: Mapping[Part, Dataset[Any]]) -> dict[str, float]:
    """Return the perplexity per character on test data by the name of the table.

    Args:
        parts: data sets of ``(codes, next codes)``, of which all have one length.
    """
    windows = {part: _windows(parts[part]) for part in ("train", "validation", "test")}
    symbols = 1 + max(int(each.max()) for each in windows.values())
    tables = [
        torch.full((symbols,), 1 / symbols, dtype=torch.float64)
    ]  # before any count, all characters are as likely
    found = {}
    for length, name in NAMES.items():
        counts = count(windows["train"], length, symbols)
        made = [smoothed(counts, tables[-1], pseudo) for pseudo in PSEUDO_COUNTS]
        tables.append(min(made, key=lambda table: perplexity([*tables, table], windows["validation"])))
        found[name] = perplexity(tables, windows["test"])
    return found


def count(windows: Tensor, length: int, symbols: int) -> Tensor:
    """Count the n-grams of a length in windows ``(n, characters)``: a tensor with a dimension for each character.

    Those that end in a target: the first character of a window is given and not predicted.
    """
    grams = windows[:, max(0, 2 - length) :].unfold(1, length, 1).reshape(-1, length)
    places = torch.tensor([symbols**power for power in reversed(range(length))])
    return torch.bincount(grams @ places, minlength=symbols**length).double().view((symbols,) * length)


def smoothed(counts: Tensor, shorter: Tensor, pseudo: float) -> Tensor:
    """Return the probabilities of the last character, smoothed with those of a table of at most one character less."""
    return (counts + pseudo * shorter) / (counts.sum(-1, keepdim=True) + pseudo)


def perplexity(tables: list[Tensor], windows: Tensor) -> float:
    """The exponential of the mean negative log-likelihood; at a window's beginning, of the longest table that fits."""
    total = 0.0
    for place in range(1, windows.shape[1]):
        table = tables[min(len(tables) - 1, place + 1)]
        before = windows[:, place + 1 - table.dim() : place + 1]
        total -= float(table[tuple(before.unbind(1))].log().sum())
    return math.exp(total / windows[:, 1:].numel())


def _windows(data: Dataset[Any]) -> Tensor:
    inputs, targets = default_collate([data[index] for index in range(len(data))])  # type: ignore[arg-type]
    windows: Tensor = torch.cat([inputs, targets[:, -1:]], 1)
    return windows
