"""A Trainer refuses two plug-ins that write the same file or have the same effect; writers of fixed files set `once`."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch

import hocket
from hocket.errors import WrongValue
from hocket.plugins import PluginError, registry
from hocket_insight.callbacks.memory_report import MemoryReport

#: The arguments that name what a plug-in writes.
PLACES = {"filename", "folder", "path", "out", "url"}
#: Plug-ins whose modules use the folder of the run for something else than a file of a fixed name, and for what.
OTHERS = {
    "profiler": "a folder that is cleared by each", "artifacts": "copies of its files", "wandb": "a folder of the library",
    "comet": "a folder of the library", "mlflow": "a folder of the library", "trackio": "a folder of the library",
}  # fmt: skip


class Mine(MemoryReport):
    pass


class Other(MemoryReport):
    pass


def made(kind: str, *given: Any) -> hocket.Trainer:
    plugins: dict[str, Any] = {kind: list(given)}
    return hocket.Trainer(torch.nn.Linear(1, 1), device="cpu", **plugins)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("callbacks", ["memory-report", {"memory-report": {"at": 3}}], r"'memory-report' twice\. Both would write"),
        ("callbacks", ["memory-report", Mine()], r"'memory-report' and 'mine'\. Both would write"),
        ("callbacks", [Mine(), Other()], r"'mine' and 'other'\. Both would write"),
        ("callbacks", ["heartbeat", {"heartbeat": {"seconds": 5}}], r"'heartbeat' twice\. Both have the same path"),
        ("callbacks", ["lr-monitor", "lr-monitor"], r"'lr-monitor' twice\. Both have the same arguments"),
        ("algorithms", ["loss-spike-guard", {"loss-spike-guard": {"every": 3}}], r"loss_spikes\.jsonl"),
        ("algorithms", ["label-smoothing", "label-smoothing"], "Remove one, or give them different arguments"),
        ("loggers", ["jsonl", {"jsonl": {"filename": "metrics.jsonl"}}], "'jsonl' twice.*the same filename"),
        ("loggers", ["progress", "progress"], "'progress' twice"),
    ],
)
def test_two_that_do_the_same_are_refused(kind: str, given: list[Any], said: str) -> None:
    with pytest.raises(WrongValue, match=said):
        made(kind, *given)


def test_two_that_differ_are_attached() -> None:
    two = [{"early-stopping": {"monitor": name}} for name in ("eval/loss", "eval/accuracy")]
    names = [each.name for each in made("callbacks", *two).state.bus.attachments]
    assert {"early-stopping", "early-stopping-2"} <= set(names)
    made("callbacks", {"heartbeat": {"path": "a.json"}}, {"heartbeat": {"path": "b.json"}})


@pytest.mark.parametrize("kind", ["algorithms", "callbacks", "loggers"])
def test_who_writes_a_fixed_file_may_be_given_once(kind: str) -> None:
    unmarked = []
    for entry in registry.entries(kind):
        try:
            cls = entry.load()
        except PluginError:  # an extra is not installed
            continue
        writes = "run_folder /" in inspect.getsource(sys.modules[cls.__module__])
        named = PLACES & inspect.signature(cls).parameters.keys()
        if writes and not named and not getattr(cls, "once", "") and entry.name not in OTHERS:
            unmarked.append(entry.name)
    assert not unmarked, f"{unmarked} write into the folder of the run: set `once`, or let an argument name the file"
