"""The batches that are profiled: two that warm up, in which waits are searched for, and those that are measured."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from hocket import hookimpl
from hocket.basics import safe_files
from hocket.run import summary
from hocket.state.state import State
from hocket_insight.profiling.phases import Phases
from hocket_insight.profiling.summary import in_words, summarize
from hocket_insight.profiling.trace import Trace
from hocket_insight.profiling.waits import Wait, Waits

#: The name of the plug-in that is attached while the profiler waits and measures.
NAME = "profiler-window"
#: Batches before those that are measured.
WARM_UP = 2
#: The share of outliers that is worth a line.
_MUCH = 0.3
_first = hookimpl(wrapper=True, tryfirst=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of the profiler, checked."""

    asked: str
    batches: int
    trace: bool
    shapes: bool
    stack: bool
    limit: int


class Window:
    """Measure, from the first ``before_dataloader`` after it was attached on; then detach itself and write the profile."""

    def __init__(self, settings: Settings, state: State) -> None:
        self._settings = settings
        #: Whether batches were measured.
        self.measured = False
        self._begin = state.timestamp.batch
        #: Batches that are complete, warming up included.
        self._complete = 0
        self._phases: Phases | None = None
        self._data_range: Any = None
        self._notes: list[str] = []
        self._waits: Waits | None = Waits(state.device.type == "cpu")
        #: The waits of each batch that was watched.
        self._found: list[Counter[Wait]] = []
        if _compiled(state):
            self._waits = None
            self._notes.append(
                "Lines that wait for the device were not searched for, because this process has compiled code."
            )
        self._profile = self._started(state) if settings.trace else None
        self._watching = False

    def _started(self, state: State) -> profile | None:
        """Return torch's profiler, started; None if another one runs."""
        settings = self._settings
        activities = [ProfilerActivity.CPU]
        if state.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self._notes.append("There is no trace, because another profiler of torch was running.")
            return None
        made = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARM_UP, active=settings.batches, repeat=1),
            record_shapes=settings.shapes,
            with_stack=settings.stack,
            acc_events=True,
        )
        made.start()
        return made

    # --- the position in a step

    @_first
    def before_dataloader(self, state: State) -> Iterator[None]:
        """End a batch, and the window after its last one; then the loop waits for data."""
        self._end_batch(state)
        if self._complete >= WARM_UP + self._settings.batches:
            self._finish(state)
        elif self._complete >= WARM_UP and self._phases is None:
            state.bus.measure(True, record_function if self._profile is not None else None)
            self._phases = Phases(state.bus, {"profiler", NAME})
            self._phases.begin()
        yield
        self._wait()

    @_first
    def after_dataloader(self, state: State) -> Iterator[None]:
        """The batch is loaded."""
        self._loaded()
        yield

    @_first
    def batch_start(self, state: State) -> Iterator[None]:
        """From now on the batch is, or will be, on the device."""
        self._loaded()
        yield
        if self._phases is None and self._waits is not None:
            self._waits.begin()
            self._watching = True

    @_first
    def epoch_end(self, state: State) -> Iterator[None]:
        """The data is exhausted."""
        self._loaded()
        yield

    @_first
    def epoch_start(self, state: State) -> Iterator[None]:
        """The data begins anew."""
        yield
        self._wait()

    @_first
    def eval_before_all(self, state: State) -> Iterator[None]:
        """Time in evaluation is its own phase, in which waits are not searched for."""
        if self._waits is not None:
            self._waits.end()
        if self._phases is not None:
            self._phases.end()
            self._phases.begin()
        yield

    @_first
    def eval_after_all(self, state: State) -> Iterator[None]:
        """Evaluation is over."""
        yield
        if self._phases is not None:
            self._phases.end(evaluation=True)
            self._phases.begin()

    @_first
    def fit_end(self, state: State) -> Iterator[None]:
        """Write what there is, before the other plug-ins end."""
        self._end_batch(state)
        self._finish(state)
        yield

    def exception(self, state: State) -> None:
        """Stop without a profile."""
        self._stop(state)

    def close(self, state: State) -> None:
        """Stop without a profile."""
        self._stop(state)

    # --- inside

    def _wait(self) -> None:
        if self._phases is not None:
            self._phases.wait()
            self._data_range = record_function("data")
            self._data_range.__enter__()

    def _loaded(self) -> None:
        if self._phases is not None:
            self._phases.loaded()
            self._end_range()

    def _end_range(self) -> None:
        if self._data_range is not None:
            self._data_range.__exit__(None, None, None)
            self._data_range = None

    def _end_batch(self, state: State) -> None:
        """End the batch, if there is one since the last call. The profilers' own time is not that of a batch."""
        complete = state.timestamp.batch - self._begin
        if complete == self._complete:
            self._loaded()
            return
        self._complete = complete
        self._end_range()
        if self._phases is not None:
            self._phases.end()
            self._phases.next_batch()
        if self._watching and self._waits is not None:
            self._found.append(self._waits.found)
            self._waits.found = Counter()
        self._end_watching()
        if self._profile is not None:
            self._profile.step()
        if self._phases is not None:
            self._phases.begin()

    def _end_watching(self) -> None:
        self._watching = False
        if self._waits is not None:
            self._waits.end()

    def _stop(self, state: State) -> None:
        """Stop everything, and detach this plug-in. Does nothing the second time."""
        attachment = next((each for each in state.bus.attachments if each.obj is self), None)
        if attachment is None:
            return
        self._end_watching()
        self._end_range()
        if self._phases is not None:
            state.bus.measure(False)
        state.bus.detach(attachment)
        if self._profile is not None:
            self._profile.stop()

    def _finish(self, state: State) -> None:
        phases = self._phases
        self._stop(state)
        self._phases = None
        if phases is None:
            return
        self.measured = True
        _write(state, self._settings, self._measured(state, phases), self._begin + WARM_UP + 1)

    def _measured(self, state: State, phases: Phases) -> dict[str, Any]:
        """Return what this rank has measured, with its trace written."""
        trace, file, python = None, None, {}
        if self._profile is not None:
            try:
                trace, file = self._trace(state)
            except (OSError, ValueError) as error:  # ValueError: the file is not JSON
                self._notes.append(f"The trace of rank {state.strategy.rank} was not written: {error}.")
        whole = sum(phases.seconds.values())
        removed, left = phases.without_outliers()
        if removed > _MUCH * whole:
            self._notes.append(
                f"Rank {state.strategy.rank} had outliers of {removed * 1e3:.3g} ms together: in each phase the "
                "slowest batch counts as the second slowest."
            )
        if trace is not None:
            python = {phase: seconds * left.get(phase, 1.0) for phase, seconds in trace.outside_torch().items()}
            for phase, seconds in trace.exposed_communication().items():
                phases.shift(phase, "", "communication", seconds * left.get(phase, 1.0))
            for (phase, plugin), seconds in trace.synchronisation().items():
                phase = phase or phases.of_plugin(plugin)
                phases.shift(phase, plugin, "synchronisation", seconds * left.get(phase, 1.0))
        return {
            "seconds": dict(phases.seconds),
            "plugins": {
                name: {"kind": phases.kind_of(name), "seconds": dict(hooks)} for name, hooks in phases.plugins.items()
            },
            "batches": self._complete - WARM_UP,
            "waits": _in_every_batch(self._found),
            "python": python,
            "device_time": None if trace is None else trace.device(),
            "trace": file,
            "notes": self._notes,
        }

    def _trace(self, state: State) -> tuple[Trace, str | None]:
        """Return the trace, and the name of its file; None if it is too large."""
        assert self._profile is not None
        folder = state.run_folder / "profile"
        folder.mkdir(exist_ok=True)
        name = f"rank{state.strategy.rank}.json.gz"
        raw = folder / f".{name.removesuffix('.gz')}"
        try:
            self._profile.export_chrome_trace(str(raw))
            trace = Trace.read(raw)
        finally:
            raw.unlink(missing_ok=True)
        said, written = trace.write(folder / name, self._settings.limit // state.strategy.world_size)
        if said:
            self._notes.append(said)
        return trace, name if written else None


def _write(state: State, settings: Settings, measured: dict[str, Any], first: int) -> None:
    """Combine what ranks have measured, write the summary, and show it."""
    ranks = state.bus.all_gather_object(measured)
    if state.strategy.rank != 0:
        return
    about = {
        "asked": settings.asked,
        "complete": measured["batches"] == settings.batches,
        "first_batch": first,
        "device": state.device.type,
        "facts": _facts(state),
    }
    found = summarize(ranks, about)
    words = in_words(found)
    try:
        folder = state.run_folder / "profile"
        folder.mkdir(exist_ok=True)
        for name, text in (("summary.json", json.dumps(found, indent=2) + "\n"), ("summary.txt", words)):
            safe_files.replace(folder / name, text)
        where = [f"the profile is in {folder}"] if state.folder.lasting else []
    except OSError as error:
        where = [f"the profile was not written: {error}"]
    state.bus.log_text(state, "profile", words)
    advice = [f"try: {found['causes'][0]['advice'][0]}"] if found["causes"] else []
    summary.show_lines(state, [f"profile: {found['verdict']}", *advice, *where])


def _facts(state: State) -> dict[str, Any]:
    """Return what advice depends on."""
    precision = next((each.name for each in state.bus.attachments if each.kind == "precisions"), "")
    return {
        "num_workers": getattr(state.train_data, "num_workers", None),
        "precision": precision,
        "device": state.device.type,
        "compiled": _compiled(state),
        "microbatch": state.microbatch,
    }


def _compiled(state: State) -> bool:
    """Whether the model is compiled, or code was compiled in this process, whose use cannot be seen."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in state.task.modules()):
        return True
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def _in_every_batch(found: list[Counter[Wait]]) -> list[dict[str, Any]]:
    """Return the waits that all watched batches have, the most frequent first."""
    if not found:
        return []
    total = sum(found, Counter())
    return [
        {
            "where": f"{_shown(wait.file)}:{wait.line}",
            "function": wait.function,
            "call": wait.call,
            "per_batch": count / len(found),
        }
        for wait, count in total.most_common()
        if all(wait in each for each in found)
    ]


def _shown(file: str) -> str:
    """Return a path relative to the current folder, if it is below it."""
    try:
        return str(Path(file).relative_to(os.getcwd()))
    except ValueError:
        return file
