"""Logging of the memory of the process and its device."""

from __future__ import annotations

import sys

from hocket.state.periodic import Periodic
from hocket.state.state import State


class MemoryMonitor(Periodic):
    """Log memory in bytes: ``memory/resident_peak`` of the process, and the statistics of the device, if it has any.

    The device's statistics are named ``memory/allocated``, ``memory/peak_allocated`` and so on. All values are those of this
    rank only. On Windows Python does not provide the peak of a process, and it is omitted.

    Args:
        every: how often to log; the end of a fit logs too.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.memory_monitor import MemoryMonitor
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, callbacks=[MemoryMonitor(every="50ba")], loggers=["jsonl"], device="cpu")
    """

    def __init__(self, every: str = "50ba") -> None:
        super().__init__(every)

    def _report(self, state: State) -> None:
        figures = {**resident_peak(), **state.device_kind.memory()}
        state.log({f"memory/{name}": value for name, value in figures.items()})


def resident_peak() -> dict[str, float]:
    """Return the largest number of resident bytes of this process so far, as ``resident_peak``; empty if it is unknown."""
    try:
        import resource
    except ImportError:
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"resident_peak": float(peak if sys.platform == "darwin" else peak * 1024)}
