"""The file ``summary.json`` of a run: its state, plan, software and costs, for ``hocket runs`` and reports."""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hocket.basics import safe_files
from hocket.basics.history import POSITION
from hocket.basics.run_files import SUMMARY, content, number, objects, started
from hocket.basics.timestamp import Timestamp
from hocket.plugins import registry
from hocket.plugins.plan import calls
from hocket.state.state import State
from hocket_loggers.resumable_lines import encode


class RunSummary:
    """Write the file when a fit starts and ends, atomically. In between, values are only counted.

    Args:
        seconds, batches: those of earlier fits, as `fits` returned them.
    """

    def __init__(self, seconds: float = 0.0, batches: int = 0) -> None:
        self._path: Path | None = None
        self._content: dict[str, Any] = {}
        #: The latest value of each metric, and its least and greatest finite ones, NaN if there are none.
        self._values: dict[str, list[float]] = {}
        self._read = False
        #: Seconds and batches of the earlier fits, and when and where the current one began.
        self._seconds, self._batches = seconds, batches
        self._began, self._first = 0.0, 0
        self._now: Timestamp | None = None

    def begin(self, metrics: Path, state: State) -> None:
        """Write that the run is being trained. ``metrics`` is the file of its metrics, whose earlier lines are read."""
        self._path = self._beside(metrics)
        if self._path is None:
            return
        self._began, self._first, self._now = time.time(), state.timestamp.batch, state.timestamp
        listings = (getattr(each.obj, "listing", None) for each in state.bus.attachments)
        best = next((each.rule for each in listings if each is not None), None)
        self._content = {
            "version": 1,
            "run": state.run.id,
            "name": state.run.name,
            "process": {"host": socket.gethostname(), "pid": os.getpid(), "started": started(os.getpid())},
            "fit_began": self._began,
            "duration": None if state.max_duration is None else str(state.max_duration),
            "best": best,
            "plan": _plan(state),
            "system": system(state),
        }
        self._write(state, "running")

    def _beside(self, metrics: Path) -> Path | None:
        """Return the summary's path after the metrics were read once; None for another file of the run, or another rank."""
        if metrics.stem != "metrics":
            return None
        if not self._read:
            self._read, self._values = True, {}
            for line in objects(metrics):
                self.add({name: number(value) for name, value in line.items() if name not in POSITION})
        return metrics.with_name(SUMMARY)

    def evaluated(self, metrics: Path, state: State) -> None:
        """Add the values of an evaluation after a fit to the summary that the run's latest fit has written."""
        path = self._beside(metrics)
        if path is not None and (there := content(path)).get("run") == state.run.id:
            there |= {"evaluated": sorted(state.metrics), "values": self._values}
            safe_files.replace(path, encode(there) + "\n")

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Note the latest values."""
        for name, value in metrics.items():
            if not isinstance(value, int | float):
                continue
            known = self._values.setdefault(name, [value, math.nan, math.nan])
            known[0] = value
            if math.isfinite(value):
                if not known[1] <= value:
                    known[1] = value
                if not known[2] >= value:
                    known[2] = value

    def fits(self) -> dict[str, Any]:
        """Return seconds and batches of all fits until now."""
        seconds, batches = self._seconds, self._batches
        if self._now is not None and self._path is not None:
            seconds, batches = seconds + time.time() - self._began, batches + self._now.batch - self._first
        return {"seconds": seconds, "batches": batches}

    def end(self, state: State, status: str) -> None:
        """Write how the fit ended. Does nothing if none began."""
        if self._path is not None:
            self._seconds, self._batches = self.fits().values()
            self._write(state, status)
            self._path = None

    def _write(self, state: State, status: str) -> None:
        assert self._path is not None
        now, error = state.timestamp, state.exception
        costs = [
            {"plugin": plugin, "hook": hook, "calls": int(count), "seconds": seconds, "inside": inside}
            for (plugin, hook), (count, seconds, inside) in state.bus.account.items()
            if count and state.bus.profile  # not those of a few batches that a profile measured
        ]
        summary = self._content | {
            "status": status,
            "error": None if error is None else f"{type(error).__name__}: {error}"[:2000].rstrip(": "),
            "stop_reason": state.stop_reason,
            "written": time.time(),
            "position": {
                "epoch": now.epoch, "batch": now.batch, "sample": now.sample, "token": now.token, "seconds": now.seconds,
            },
            "evaluated": sorted(state.metrics),
            "values": self._values,
            "costs": costs,
            "fit_seconds": self._seconds,
            "fit_batches": self._batches,
        }  # fmt: skip
        safe_files.replace(self._path, encode(summary) + "\n")


def _plan(state: State) -> dict[str, Any]:
    events, actions = calls(state.bus)
    return {
        "plugins": [
            {
                "kind": each.kind, "name": each.name, "dist": each.dist, "version": each.version,
                "config": {str(key): repr(value)[:200] for key, value in each.config.items()},
            }
            for each in state.bus.attachments
        ],
        "events": events,
        "actions": actions,
        "replaced": len(state.replacements),
    }  # fmt: skip


def system(state: State) -> dict[str, str]:
    """Return facts about the machine and the software."""
    device = str(state.device)
    if state.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(state.device)} ({device})"
    facts = {
        "device": device,
        "ranks": str(state.strategy.world_size),
        "host": socket.gethostname(),
        "processor": f"{_processor()}, {os.cpu_count()} logical cores",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads of torch": str(torch.get_num_threads()),
    }
    return facts | {each.dist: each.version for each in registry.installed().entries if each.dist}


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        name = ""
    return name or platform.processor() or platform.machine()
