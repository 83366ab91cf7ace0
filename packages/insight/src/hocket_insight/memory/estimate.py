"""Compare the memory of strategies, and find the largest microbatch that fits."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hocket.errors import WrongValue
from hocket_insight.memory.rehearsal import Rehearsal

_UNITS = {"b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
#: What is not in an estimate; the last lines of each.
NOT_COUNTED = (
    "not counted: memory within kernels, the allocator's fragmentation, the CUDA context and NCCL's buffers, evaluation, "
    "checkpoints, callbacks, torch.compile, algorithms that start later"
)


def size_of(text: str) -> int:
    """Return the bytes of a size, such as ``24GiB``, ``80 GB`` or ``500MiB``. Raises ValueError.

    Example:
        >>> from hocket_insight.memory.estimate import size_of
        >>> size_of("24GiB")
        25769803776
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*(b|[kmgt]i?)b?\s*", text.lower())
    try:
        assert found is not None
        size = int(float(found[1]) * _UNITS[found[2]])
        assert size > 0
    except (AssertionError, KeyError, ValueError):
        raise WrongValue(
            f"--memory {text} is not a size with its unit. Write --memory 24GiB, 80GB or 500MiB."
        ) from None
    return size


def shown(size: int) -> str:
    """Return bytes for people.

    Example:
        >>> from hocket_insight.memory.estimate import shown
        >>> shown(25769803776), shown(512)
        ('24.00 GiB', '512 B')
    """
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**exponent:
            return f"{size / 1024**exponent:.2f} {unit}"
    return f"{size} B"


def largest_microbatch(first: Rehearsal, at: Callable[[int], Rehearsal], memory: int) -> int:
    """Return the most samples of a rank's batch that fit in one forward pass; 0 if not even one does.

    Memory grows nearly linearly with the microbatch, so each size is interpolated from two that were rehearsed.

    Args:
        first: the rehearsal with ``first.microbatch`` samples.
        at: rehearses another size.
        memory: bytes.
    """
    peaks = {first.microbatch: first.peak}
    fits, too_large = 0, first.samples + 1
    size = first.microbatch
    while too_large - fits > 1:
        if size not in peaks:
            peaks[size] = at(size).peak
        if peaks[size] <= memory:
            fits = max(fits, size)
        else:
            too_large = min(too_large, size)
        (few, low), *_, (many, high) = sorted(peaks.items()) if len(peaks) > 1 else [*peaks.items()] * 2
        size = first.samples if fits else max(too_large // 2, 1)
        if many > few and high > low:
            size = few + int((memory - low) * (many - few) / (high - low))
        size = min(max(size, fits + 1), too_large - 1)
    return fits


def table(rehearsals: Mapping[str, Rehearsal], microbatches: Mapping[str, int], memory: Mapping[str, int]) -> str:
    """Return the estimates side by side, the largest parts of the first, and the omitted parts."""
    first = next(iter(rehearsals.values()))
    rows: list[list[str]] = [["", *rehearsals]]
    rows += [[kind, *(shown(each.kinds[kind]) for each in rehearsals.values())] for kind in first.kinds]
    rows.append(["peak on a rank", *(shown(each.peak) for each in rehearsals.values())])
    rows.append(["reached in", *(each.phase for each in rehearsals.values())])
    rows.append(["samples at once", *(f"{each.microbatch} of {each.samples}" for each in rehearsals.values())])
    if microbatches:
        said = [
            f"{microbatches[name] or 'not even 1'} in {shown(memory[name])}" if name in microbatches else "?"
            for name in rehearsals
        ]
        rows.append(["most that fit", *said])
    lines = [aligned(rows)]
    for name, each in rehearsals.items():
        largest = [[f"  {shown(size)}", kind, module or "-"] for module, kind, size in each.modules[:5] if size]
        lines += ["", f"largest parts of {name}, in bytes, kind and module", aligned(largest)]
        lines += [f"{name}: {note}" for note in each.notes]
    return "\n".join([*lines, "", NOT_COUNTED])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_json(rehearsals: Mapping[str, Rehearsal], microbatches: Mapping[str, int]) -> dict[str, Any]:
    """Return the estimates as JSON-like values."""
    return {
        name: dataclasses.asdict(each) | {"largest_microbatch": microbatches.get(name)}
        for name, each in rehearsals.items()
    }
