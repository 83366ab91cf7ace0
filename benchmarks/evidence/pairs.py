"""Differences paired by seed: means, Student's 95 % intervals, and the verdict that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

from scipy.stats import t

WORTH, DEPENDS, RARELY = "✅", "🚧", "❗"
#: At most this multiple of plain's time per step counts as the same cost; timings of short runs differ by as much.
SAME_COST = 1.05


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    deviation: float
    count: int

    def expects(self, mean: float, count: int) -> bool:
        """Whether a repetition agrees: the mean of ``count`` new values lies in the 95 % prediction interval.

        The prediction interval adds the noise of the new mean to the confidence interval: ``t · s · √(1/n + 1/m)``.
        """
        half = _t(self.count) * self.deviation * math.sqrt(1 / self.count + 1 / count)
        return abs(mean - self.mean) <= half + 1e-9

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval(values: Sequence[float]) -> Interval:
    """Mean and Student's 95 % interval of the mean, ``x̄ ± t(0.975, n - 1) · s / √n``. Raises ValueError below two values.

    Example:
        >>> around = interval([1.0, 2.0, 3.0])
        >>> round(around.low, 2), around.mean, round(around.high, 2)
        (-0.48, 2.0, 4.48)
    """
    if len(values) < 2:
        raise ValueError(f"An interval needs at least two values, and there are {len(values)}. Measure more seeds.")
    mean, deviation = fmean(values), stdev(values)
    half = _t(len(values)) * deviation / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, deviation, len(values))


def _t(count: int) -> float:
    return float(t.ppf(0.975, count - 1))


def ratio_interval(values: Sequence[float]) -> Interval:
    """The interval of a geometric mean; ``deviation`` is that of the logarithms."""
    logs = interval([math.log(value) for value in values])
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.deviation, logs.count)


def time_to(target: float, curves: Sequence[Sequence[Sequence[float]]], higher_is_better: bool) -> float | None:
    """Mean seconds of training until the mean quality over the seeds is at least the target; None if it never is.

    Args:
        target: a quality.
        curves: by seed, ``(batch, seconds, quality)`` at each evaluation.
        higher_is_better: else at most the target.
    """
    sign = 1 if higher_is_better else -1
    for points in zip(*curves, strict=True):
        if sign * fmean(quality for _, _, quality in points) >= sign * target - 1e-9:
            return fmean(seconds for _, seconds, _ in points)
    return None


def summary(pairs: Sequence[Mapping[str, Any]], higher_is_better: bool, margin: float) -> dict[str, Any]:
    """What the tables say about a row on a task; the target is plain's mean final quality.

    Args:
        pairs: by seed, ``{"seed", "plain", "row"}`` with what `measure.run` returned.
        higher_is_better: else a lower quality is better.
        margin: the difference in quality that does not matter.

    Returns:
        ``gain`` is the paired difference to plain, positive where the row is better; ``as_good`` whether its interval
        excludes a loss of more than the margin; ``cost`` the median over seeds of
        seconds per step ÷ plain's; ``time`` the seconds of the whole training ÷ plain's; ``to_target`` the seconds until
        the target ÷ plain's, or None.
    """
    sign = 1 if higher_is_better else -1
    plain, row = [pair["plain"] for pair in pairs], [pair["row"] for pair in pairs]
    both = list(zip(row, plain, strict=True))
    target = fmean(run["quality"] for run in plain)
    reached, reached_plain = (
        time_to(target, [run["curve"] for run in runs], higher_is_better) for runs in (row, plain)
    )
    assert reached_plain is not None  # its last evaluation is the target
    gain = interval([sign * (a["quality"] - b["quality"]) for a, b in both])
    return {
        "seeds": [pair["seed"] for pair in pairs],
        "plain": _quality(plain),
        "row": _quality(row),
        "gain": asdict(gain),
        "as_good": gain.low >= -margin,
        "cost": median(a["seconds"] / a["steps"] / (b["seconds"] / b["steps"]) for a, b in both),
        "step_us": [median(run["step_us"] for run in runs) for runs in (plain, row)],
        "time": asdict(ratio_interval([a["seconds"] / b["seconds"] for a, b in both])),
        "seconds": [median(run["seconds"] for run in runs) for runs in (plain, row)],
        "to_target": None if reached is None else reached / reached_plain,
        "peak_mib": [median(run["peak_mib"] for run in runs) for runs in (plain, row)],
        "memory": asdict(ratio_interval([a["peak_mib"] / b["peak_mib"] for a, b in both])),
        "warned": sorted({text for run in row for text in run["warned"]}),
    }


def _quality(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [run["quality"] for run in runs]
    return {"mean": fmean(values), "deviation": stdev(values), "values": [round(value, 4) for value in values]}


def verdict(cells: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """A symbol and its reason, from the summaries by task; without any, where ``{"error": …}`` is in place of each, no symbol.

    - ✅ worth it: no task is worse, and on some task training takes less time for a quality as good, or
      quality is better at the same cost or in at most 0.9 of the time to the target.
    - 🚧 depends: some task is better or takes less time, but another is worse or the cost is higher; or memory shrinks to
      at most 0.9 of plain's, with no task worse.
    - ❗ rarely: none of this.

    "Better", "worse", "less time" and less memory mean that the 95 % interval excludes the contrary, and "as good" that it
    excludes a loss of more than the task's margin.
    """
    known = {task: cell for task, cell in cells.items() if "gain" in cell}
    if not known:
        return "", "not measured"
    better = [task for task, cell in known.items() if cell["gain"]["low"] > 0]
    worse = [task for task, cell in known.items() if cell["gain"]["high"] < 0]
    faster = [task for task, cell in known.items() if cell["time"]["high"] < 1 and cell["as_good"]]
    cheap = [task for task in better if _no_dearer(known[task])]
    reasons = [
        f"{words} on {', '.join(tasks)}"
        for words, tasks in (("better", better), ("faster", faster), ("worse", worse))
        if tasks
    ]
    if dear := [task for task in better if task not in cheap]:
        reasons.append(f"{max(known[task]['cost'] for task in dear):.2f} times the cost of a step")
    smaller = [task for task, cell in known.items() if cell["memory"]["high"] <= 0.9 and task not in worse]
    if smaller:
        reasons.append(f"less memory on {', '.join(smaller)}")
    why = "; ".join(reasons) or "no difference beyond the noise"
    if (cheap or faster) and not worse:
        return WORTH, why
    return (DEPENDS if better or faster or (smaller and not worse) else RARELY), why


def _no_dearer(cell: Mapping[str, Any]) -> bool:
    return cell["cost"] <= SAME_COST or (cell["to_target"] is not None and cell["to_target"] <= 0.9)
