"""Differences paired by seed: means, Student's 95 % intervals, and the verdicts that many of them together allow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

from scipy.stats import nct, t

WORTH, DEPENDS, NOT_SHOWN = "✅", "🚧", "❗"
#: The part of all claims of a kind, such as "better", that may be false on average.
FALSE_DISCOVERIES = 0.05
#: At most this multiple of plain's memory is less memory, and of plain's time to the target quicker, in verdicts.
LESS = 0.9
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


def summary(pairs: Sequence[Mapping[str, Any]], higher_is_better: bool) -> dict[str, Any]:
    """What the tables say about a row on a task; the target is plain's mean final quality.

    Args:
        pairs: by seed, ``{"seed", "plain", "row"}`` with what `measure.run` returned.
        higher_is_better: else a lower quality is better.

    Returns:
        ``gain`` is the paired difference to plain, positive where the row is better; ``cost`` the median over seeds of seconds
        per step ÷ plain's; ``time`` the seconds of the whole training ÷ plain's; ``to_target`` the seconds until
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


def p_value(around: Mapping[str, Any], null: float = 0.0, ratio: bool = False) -> float:
    """The two-sided p-value of Student's t-test that a mean of an interval is ``null``.

    Args:
        around: a field of `summary`: ``mean``, ``deviation`` and ``count``.
        null: the mean without an effect.
        ratio: whether it is one of `ratio_interval`, which is tested in logarithms.

    Example:
        >>> around = interval([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
        >>> round(p_value(asdict(around)), 4)
        0.0028
    """
    distance = math.log(around["mean"] / null) if ratio else around["mean"] - null
    error = around["deviation"] / math.sqrt(around["count"])
    if error == 0:
        return 1.0 if distance == 0 else 0.0
    return float(2 * t.sf(abs(distance) / error, around["count"] - 1))


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values of many tests: among those of at most q, on average at most the fraction q is of tests without an effect.

    Benjamini and Hochberg 1995, "Controlling the False Discovery Rate", as adjusted p-values: of ascending ones
    ``min over j >= i of p_j · m / j``.

    Example:
        >>> benjamini_hochberg([0.01, 0.04, 0.02, 0.9])
        [0.04, 0.05..., 0.04, 0.9]
    """
    count, least = len(p_values), 1.0
    adjusted = [1.0] * count
    for rank, index in sorted(enumerate(sorted(range(count), key=p_values.__getitem__), 1), reverse=True):
        adjusted[index] = least = min(least, p_values[index] * count / rank)
    return adjusted


def power(effect: float, count: int, level: float = 0.05) -> float:
    """The probability that a t-test of ``count`` differences finds a mean of ``effect`` of their standard deviations."""
    limit, shift = t.ppf(1 - level / 2, count - 1), effect * math.sqrt(count)
    return float(nct.sf(limit, count - 1, shift) + nct.cdf(-limit, count - 1, shift))


def detectable(count: int, level: float = 0.05) -> float:
    """The effect, in standard deviations of the differences, that is found in four of five repetitions."""
    low, high = 0.0, 100.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, count, level) < 0.8 else (low, middle)  # NaN far away
    return high


#: What verdicts claim: the field of a summary, the value without an effect, and whether it is a ratio.
_CLAIMS = {"gain": (0.0, False), "time": (1.0, True), "memory": (LESS, True)}


def compared(cell: Mapping[str, Any]) -> bool:
    """Whether a cell is a comparison: it did not fail, and the method had an effect there."""
    return "gain" in cell and not cell.get("warned")


def timed(cell: Mapping[str, Any]) -> bool:
    """Whether a cell's times count: they were measured on an idle machine."""
    return not cell.get("untimed")


def judge(entries: Mapping[str, dict[str, Any]], margins: Mapping[str, float]) -> None:
    """Write into entries, each with ``cells`` by task, what all their comparisons together allow to say.

    Each compared cell gets ``as_good``, and ``adjusted``: p-values of gain, time and memory, by `benjamini_hochberg` over the
    cells of all entries. Each entry gets ``verdict`` and ``why``.

    Args:
        entries: rows, or recipes, by name.
        margins: by task, the loss that does not matter.
    """
    cells = [(task, cell) for entry in entries.values() for task, cell in entry["cells"].items()]
    for task, cell in cells:
        cell.pop("adjusted", None)
        if "gain" in cell:
            cell["as_good"] = cell["gain"]["low"] >= -margins[task]
    for claim, (null, ratio) in _CLAIMS.items():
        tested = [cell for _, cell in cells if compared(cell) and (claim != "time" or timed(cell))]
        adjusted = benjamini_hochberg([p_value(cell[claim], null, ratio) for cell in tested])
        for cell, value in zip(tested, adjusted, strict=True):
            cell.setdefault("adjusted", {})[claim] = value
    for entry in entries.values():
        entry["verdict"], entry["why"] = verdict(entry["cells"])


def shows(cell: Mapping[str, Any], claim: str) -> bool:
    """Whether a claim about a cell remains after the correction for many comparisons."""
    return bool(cell.get("adjusted", {}).get(claim, 1.0) <= FALSE_DISCOVERIES)


def verdict(cells: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """A symbol and its reason, from judged summaries by task; no symbol if there is ``{"error": …}`` in place of each.

    - ✅ worth it: as good on all tasks, and on some task faster, or better at the same cost or in at most 0.9 of the time to
      the target.
    - 🚧 depends: on some task better, or faster and as good there; or memory shrinks to less than 0.9 of plain's, and no task
      is worse.
    - ❗ not shown: none of this.

    "Better", "worse", "faster" and less memory are what remains after `benjamini_hochberg` over all comparisons
    (:func:`judge`). "As good" is a method on a task if the 95 % interval of its gain excludes a loss of more than the
    task's margin. That all tasks have to be as good needs no further correction: one that is not refuses the symbol.
    """
    known = {task: cell for task, cell in cells.items() if compared(cell)}
    without = [task for task, cell in cells.items() if cell.get("warned")]
    if not known:
        return "", f"no effect on {', '.join(without)}" if without else "not measured"
    better = [task for task, cell in known.items() if shows(cell, "gain") and cell["gain"]["mean"] > 0]
    worse = [task for task, cell in known.items() if shows(cell, "gain") and cell["gain"]["mean"] < 0]
    quicker = [task for task, cell in known.items() if shows(cell, "time") and cell["time"]["mean"] < 1]
    faster = [task for task in quicker if known[task]["as_good"]]
    doubtful = [task for task, cell in known.items() if not cell["as_good"] and task not in worse]
    dear = [task for task in better if not _no_dearer(known[task])]
    smaller = [task for task, cell in known.items() if shows(cell, "memory") and cell["memory"]["mean"] < LESS]
    reasons = [
        f"{words} on {', '.join(tasks)}"
        for words, tasks in (("better", better), ("faster", faster), ("worse", worse), ("less memory", smaller))
        if tasks
    ]
    if costs := [known[task]["cost"] for task in dear if timed(known[task])]:
        reasons.append(f"{max(costs):.2f} times the cost of a step")
    if unknown := [task for task in dear if not timed(known[task])]:
        reasons.append(f"the cost was not measured on {', '.join(unknown)}")
    if (better or faster) and doubtful:
        reasons.append(f"a loss is not excluded on {', '.join(doubtful)}")
    if without:
        reasons.append(f"no effect on {', '.join(without)}")
    why = "; ".join(reasons) or "no difference was shown"
    if (set(better) - set(dear) or faster) and not worse and not doubtful:
        return WORTH, why
    return (DEPENDS if better or faster or (smaller and not worse) else NOT_SHOWN), why


def _no_dearer(cell: Mapping[str, Any]) -> bool:
    if not timed(cell):
        return False
    return cell["cost"] <= SAME_COST or (cell["to_target"] is not None and cell["to_target"] <= LESS)
