"""Read and shrink the trace of torch's profiler: what only it knows about a step."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hocket_insight.profiling.phases import phase_of

#: Calls of the host that wait for a CUDA or ROCm device.
_WAITING = {
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "hipDeviceSynchronize", "hipStreamSynchronize", "hipEventSynchronize", "hipMemcpy",
}  # fmt: skip
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_COLLECTIVE = ("gloo:", "nccl:", "mpi:", "ucc:", "c10d::")

Intervals = list[tuple[float, float]]


class Trace:
    """A Chrome trace of torch's profiler, whose batches are its ``ProfilerStep#n``. Times are in microseconds.

    Args:
        events: of the trace, as the file has them under ``traceEvents``.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self._events = [each for each in content.get("traceEvents", ()) if each.get("ph") == "X"]
        steps = self._named("user_annotation", "ProfilerStep#")
        self._steps = sorted(map(_span, steps))
        self._thread = steps[0]["tid"] if steps else None
        self._window = (self._steps[0][0], self._steps[-1][1]) if self._steps else (0.0, 0.0)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read an uncompressed file."""
        return cls(json.loads(path.read_bytes()))

    def write(self, path: Path, limit: int) -> tuple[str, bool]:
        """Write it, compressed, in at most ``limit`` bytes. Return what was omitted, or empty, and whether it was written."""
        packed, steps = self._packed(self._content["traceEvents"]), len(self._steps)
        kept = steps
        while len(packed) > limit:
            if kept <= 1:
                return (
                    f"{path.name} is not written: one batch takes {len(packed):,} bytes, the limit is {limit:,}.",
                    False,
                )
            kept = max(min(kept - 1, int(kept * limit / len(packed) * 0.9)), 1)
            end = self._steps[kept - 1][1]
            events = [e for e in self._content["traceEvents"] if e.get("ph") == "M" or e.get("ts", 0) < end]
            packed = self._packed(events)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed)
        said = (
            ""
            if kept == steps
            else f"{path.name} has the first {kept} of {steps} batches: its limit is {limit:,} bytes."
        )
        return said, True

    def _packed(self, events: Sequence[Any]) -> bytes:
        return gzip.compress(json.dumps({**self._content, "traceEvents": events}).encode(), 6)

    def _named(self, category: str, prefix: str) -> list[dict[str, Any]]:
        return [e for e in self._events if e.get("cat") == category and e["name"].startswith(prefix)]

    # --- what it tells

    def exposed_communication(self) -> dict[str, float]:
        """Return, by phase, the seconds in which the host waits for collectives and computes nothing."""
        collectives = union(_span(e) for e in self._events if e["name"].startswith(_COLLECTIVE))
        work = union(
            _span(e)
            for e in self._events
            if e["tid"] == self._thread
            and e.get("cat") == "cpu_op"
            and e["name"].startswith(("aten::", "torch::distri"))
        )
        waiting = subtract(self._inside(collectives), work)
        found = {}
        for phase in ("forward", "loss", "backward", "optimizer"):
            ranges = union(_span(e) for e in self._ranges() if "." not in e["name"] and phase_of(e["name"]) == phase)
            found[phase] = length(intersect(waiting, ranges)) / 1e6
        return found

    def outside_torch(self) -> dict[str, float]:
        """Return, for forward and loss, the seconds in which the host is in no operation of torch and no call of the device."""
        inside = union(
            _span(e)
            for e in self._events
            if e["tid"] == self._thread and e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver")
        )
        found = {}
        for phase in ("forward", "loss"):
            ranges = union(_span(e) for e in self._ranges() if "." not in e["name"] and phase_of(e["name"]) == phase)
            found[phase] = length(subtract(self._inside(ranges), inside)) / 1e6
        return found

    def synchronisation(self) -> dict[tuple[str, str], float]:
        """Return, by phase and plug-in, the seconds in which the host waits for the device; without one there are none."""
        waits = [e for e in self._events if e["name"] in _WAITING and e["tid"] == self._thread]
        ranges = sorted(self._ranges(), key=lambda e: e["ts"])
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for wait in waits:
            if not self._window[0] <= wait["ts"] < self._window[1]:
                continue
            around = [e for e in ranges if e["ts"] <= wait["ts"] < e["ts"] + e["dur"]]
            name = around[-1]["name"] if around else ""
            plugin, _, hook = name.rpartition(".")
            found["" if plugin else phase_of(hook), plugin] += wait["dur"] / 1e6
        return found

    def device(self) -> dict[str, float] | None:
        """Return the fractions of the window in which the device computes, only communicates, or idles; None without one."""
        events = [e for e in self._events if e.get("cat") in _ON_DEVICE]
        whole = self._window[1] - self._window[0]
        if not events or not whole:
            return None
        compute = self._inside(union(_span(e) for e in events if "nccl" not in e["name"].lower()))
        collectives = self._inside(union(_span(e) for e in events if "nccl" in e["name"].lower()))
        busy, communication = length(compute) / whole, length(subtract(collectives, compute)) / whole
        return {"busy": busy, "communication": communication, "idle": max(1 - busy - communication, 0.0)}

    def _ranges(self) -> list[dict[str, Any]]:
        return [
            e
            for e in self._events
            if e.get("cat") == "user_annotation" and e["tid"] == self._thread and "#" not in e["name"]
        ]

    def _inside(self, intervals: Intervals) -> Intervals:
        return intersect(intervals, [self._window])


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union, as disjoint intervals in order.

    Example:
        >>> from hocket_insight.profiling.trace import union
        >>> union([(4, 6), (0, 2), (1, 3)])
        [(0, 3), (4, 6)]
    """
    found: Intervals = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of two unions."""
    found, at = [], 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        for left, right in other[at:]:
            if left >= end:
                break
            found.append((max(begin, left), min(end, right)))
    return found


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """Return the part of one union that is outside of another.

    Example:
        >>> from hocket_insight.profiling.trace import subtract
        >>> subtract([(0, 10)], [(2, 3), (5, 12)])
        [(0, 2), (3, 5)]
    """
    found, at = [], 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        for left, right in itertools.islice(other, at, None):
            if left >= end:
                break
            if left > begin:
                found.append((begin, left))
            begin = max(begin, right)
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Intervals) -> float:
    """Return the summed length."""
    return sum(end - begin for begin, end in intervals)
