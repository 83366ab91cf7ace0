"""Whether higher or lower values of a metric are better, by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from hocket.help import warn

#: Words that a name has, or that are part of one of its words.
_PARTS = {"min": ("loss", "error", "perplexity"), "max": ("accuracy",)}
#: Whole words, with or without a number at their end.
_WORDS = {
    "min": "bpb bpc bpd brier cer fid latency mae mape mase mse msle nll ppl rmse rmsle smape ter wer",
    "max": "acc ap auc auprc auroc bleu chrf dice f1 iou jaccard map mcc meteor miou mrr ndcg precision psnr r2 recall reward "
    "rouge ssim throughput top1 top5",
}
#: The words of a class's name, such as ``BinaryF1Score``.
_OF_CLASSES = r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*"


def contradiction(name: str, mode: str | None, write: Callable[[str], str]) -> str:
    """Return the message about a mode that contradicts the metric's name, so that the worst counts as the best; or empty.

    Args:
        write: a function that writes a mode as its owner takes it, such as ``EarlyStopping(mode='max')``.
    """
    known = mode_of(name)
    if known is None or mode not in ("max", "min") or mode == known:
        return ""
    better = {"max": "higher", "min": "lower"}
    return (
        f"{write(mode)} takes {better[mode]} values of {name!r} as better, and by its name "
        f"{better[known]} ones are. Write {write(known)}, or give the metric another name if {mode!r} is right."
    )


def check_mode(name: str, mode: str | None, write: Callable[[str], str]) -> None:
    """Warn about a mode that contradicts the metric's name; see `contradiction`."""
    if text := contradiction(name, mode, write):
        warn(text)


def mode_of(name: str) -> Literal["max", "min"] | None:
    """Return which values of a metric are better, as far as its name says."""
    last = name.rpartition("/")[2]
    modes = {mode for mode, parts in _PARTS.items() if any(part in last.lower() for part in parts)}
    if not modes:
        words = [word.lower() for word in (*re.split(r"[^A-Za-z0-9]+", last), *re.findall(_OF_CLASSES, last))]
        words += [word.rstrip("0123456789") for word in words]
        modes = {mode for mode, known in _WORDS.items() if not {*known.split()}.isdisjoint(words)}
    return None if len(modes) != 1 else "min" if "min" in modes else "max"
