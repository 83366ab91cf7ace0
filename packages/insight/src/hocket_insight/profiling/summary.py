"""The summary of a profile, as plain data and in words.

``profile/summary.json`` has this layout, version 1. Later versions may add keys. All shares are fractions of the wall time of a
step, 0.0 to 1.0, means over ranks; those in ``shares`` add up to 1.

| key | value |
|---|---|
| ``version`` | 1 |
| ``asked``, ``complete`` | the window as given, and whether all of its batches were measured |
| ``first_batch``, ``batches`` | number of the first batch, counted from 1, and of batches |
| ``device``, ``world_size`` | such as ``"cpu"``; number of ranks |
| ``seconds_per_batch`` | mean wall time |
| ``shares`` | by phase (`hocket_insight.profiling.phases.PHASES`) |
| ``python`` | of ``forward`` and ``loss``, the share outside of torch's operations; empty without a trace |
| ``plugins`` | by name: ``kind``, ``share``, ``hooks`` (share by hook); the largest first |
| ``device_time`` | ``busy``, ``communication``, ``idle`` of the device, which add up to 1; null on the CPU |
| ``waits`` | lines that make the host wait in every step: ``where``, ``function``, ``call``, ``per_batch`` |
| ``ranks`` | each: ``rank``, ``seconds_per_batch``, ``own_seconds_per_batch`` (all but communication), ``shares``, ``trace`` |
| ``slowest_rank`` | the rank with the most time of its own |
| ``verdict`` | one sentence |
| ``causes`` | at most three, the largest first: ``name``, ``subject``, ``share``, ``what``, ``advice`` (a list) |
| ``advice`` | what to try if there is no cause |
| ``notes`` | what is missing, and why |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hocket_insight.profiling.causes import causes_of, general_advice, verdict_of
from hocket_insight.profiling.phases import PHASES

VERSION = 1


def summarize(measured: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of what each rank has measured.

    Args:
        measured: by rank: ``seconds`` by phase, ``plugins`` (``kind``, and ``seconds`` by hook), ``batches``, ``waits``,
            ``python`` (seconds by phase), ``device_time``, ``trace`` and ``notes``.
        about: the keys of the summary that are the same on all ranks, and ``facts`` for the advice.
    """
    total = sum(sum(each["seconds"].values()) for each in measured) or 1.0
    plugins: dict[str, dict[str, Any]] = {}
    for each in measured:
        for name, plugin in each["plugins"].items():
            hooks = plugins.setdefault(name, {"kind": plugin["kind"], "hooks": Counter()})["hooks"]
            hooks.update({hook: seconds / total for hook, seconds in plugin["seconds"].items()})
    ordered = sorted(plugins.items(), key=lambda item: -sum(item[1]["hooks"].values()))
    devices = [each["device_time"] for each in measured if each["device_time"] is not None]
    ranks = [_of_rank(rank, each) for rank, each in enumerate(measured)]
    facts = about["facts"]
    summary: dict[str, Any] = {
        "version": VERSION,
        **{key: value for key, value in about.items() if key != "facts"},
        "batches": measured[0]["batches"],
        "world_size": len(measured),
        "seconds_per_batch": total / max(sum(each["batches"] for each in measured), 1),
        "shares": {name: sum(each["seconds"].get(name, 0.0) for each in measured) / total for name in PHASES},
        "python": {
            name: sum(each["python"].get(name, 0.0) for each in measured) / total
            for name in dict.fromkeys(name for each in measured for name in each["python"])
        },
        "plugins": {
            name: {
                "kind": each["kind"],
                "share": sum(each["hooks"].values()),
                "hooks": dict(each["hooks"].most_common()),
            }
            for name, each in ordered
        },
        "device_time": {key: sum(each[key] for each in devices) / len(devices) for key in devices[0]}
        if devices
        else None,
        "waits": measured[0]["waits"],
        "ranks": ranks,
        "slowest_rank": max(ranks, key=lambda each: each["own_seconds_per_batch"])["rank"],
    }
    causes = causes_of(summary, facts)
    return {
        **summary,
        "verdict": verdict_of(summary, causes),
        "causes": [cause.as_dict() for cause in causes],
        "advice": [] if causes else general_advice(facts),
        "notes": list(dict.fromkeys(note for each in measured for note in each["notes"])),
    }


def _of_rank(rank: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    seconds, batches = measured["seconds"], max(measured["batches"], 1)
    total = sum(seconds.values())
    return {
        "rank": rank,
        "seconds_per_batch": total / batches,
        "own_seconds_per_batch": (total - seconds.get("communication", 0.0)) / batches,
        "shares": {name: seconds.get(name, 0.0) / (total or 1.0) for name in PHASES},
        "trace": measured["trace"],
    }


def in_words(summary: Mapping[str, Any]) -> str:
    """Return the summary as text."""
    each = summary["seconds_per_batch"]
    last = summary["first_batch"] + summary["batches"] - 1
    ranks = f", {summary['world_size']} ranks" if summary["world_size"] > 1 else ""
    lines = [
        f"Profile of batches {summary['first_batch']} to {last}: {each * 1e3:.3g} ms each, on {summary['device']}{ranks}.",
        "",
    ]
    if not summary["causes"]:
        lines.append(summary["verdict"])
    for number, cause in enumerate(summary["causes"], 1):
        lines += [f"{number}. {cause['what']}", *(f"   Try: {advice}." for advice in cause["advice"])]
    if summary["advice"]:
        lines.append(f"To go faster, try: {'; '.join(summary['advice'])}.")
    lines += ["", "   share   ms/batch", *_rows(summary, each)]
    if (device := summary["device_time"]) is not None:
        lines += ["", "The device: " + ", ".join(f"{name} {share:.1%}" for name, share in device.items()) + "."]
    if len(summary["ranks"]) > 1:
        lines += ["", "    rank   ms/batch   of its own"]
        lines += [
            f"{r['rank']:8d} {r['seconds_per_batch'] * 1e3:10.3f} {r['own_seconds_per_batch'] * 1e3:12.3f}"
            f"{'   slowest' if r['rank'] == summary['slowest_rank'] else ''}"
            for r in summary["ranks"]
        ]
    if summary["waits"]:
        lines += ["", "Lines that make the host wait for the device:"]
        lines += [
            f"  {w['where']} in {w['function']}: {w['call']}, {w['per_batch']:g} a batch" for w in summary["waits"]
        ]
    if summary["notes"]:
        lines += ["", *summary["notes"]]
    return "\n".join(lines) + "\n"


def _rows(summary: Mapping[str, Any], each: float) -> list[str]:
    rows = []
    for name, words in PHASES.items():
        share = summary["shares"][name]
        inside = [
            (plugin, of["share"])
            for plugin, of in summary["plugins"].items()
            if name in ("plugins", "loggers") and (of["kind"] == "loggers") == (name == "loggers")
        ]
        if share or inside:
            rows.append(f"{share:8.1%} {share * each * 1e3:10.3f}   {words}")
        rows += [f"{share:8.1%} {share * each * 1e3:10.3f}     {plugin}" for plugin, share in inside]
    return rows
