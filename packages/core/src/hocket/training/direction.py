"""Whether higher or lower values of a metric are better, by its name."""

from __future__ import annotations

import re
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


def check_mode(name: str, mode: str | None, write: str) -> None:
    """Warn about a mode that contradicts the metric's name: the worst value would be taken for the best.

    Args:
        write: who was given the mode, and how; ``{mode}`` stands for it, as in ``"EarlyStopping(mode={mode!r})"``.
    """
    known = mode_of(name)
    if known is not None and mode in ("max", "min") and mode != known:
        better = {"max": "higher", "min": "lower"}
        warn(
            f"{write.format(mode=mode)} takes {better[str(mode)]} values of {name!r} as better, and by its name "
            f"{better[known]} ones are. Write {write.format(mode=known)}, or give the metric another name if {mode!r} is right."
        )


def mode_of(name: str) -> Literal["max", "min"] | None:
    """Return which values of a metric are better, as far as its name says."""
    last = name.rpartition("/")[2]
    found = {mode for mode, parts in _PARTS.items() if any(part in last.lower() for part in parts)}
    if not found:
        words = [each.lower() for each in (*re.split(r"[^A-Za-z0-9]+", last), *re.findall(_OF_CLASSES, last))]
        words += [word.rstrip("0123456789") for word in words]
        found = {mode for mode, known in _WORDS.items() if not {*known.split()}.isdisjoint(words)}
    return None if len(found) != 1 else "min" if "min" in found else "max"
