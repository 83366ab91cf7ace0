"""Run the trials of a sweep in processes, one at a time or several, and record how each ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from hocket.plugins import PluginError
from hocket_checkpoints.storage.locks import FileLock, InUse
from hocket_cli.document import flow
from hocket_cli.sweeps.record import OVER, PRIVATE, Entry, Record
from hocket_cli.sweeps.trial import read, write

#: Seconds that interrupted trials have to write a checkpoint.
PATIENCE = 60.0


class NoMetric(PluginError):
    """No trial can have a value."""


class Running:
    """One trial's process.

    Args:
        prefix: a command that runs the trial's command, which follows it, such as ``["srun", "--gpus", "1"]``.
    """

    def __init__(
        self, record: Record, entry: Entry, prefix: list[str], arguments: list[str], prune: dict[str, Any] | None
    ) -> None:
        private = record.folder / PRIVATE
        self.entry, self._metric = entry, record.definition["metric"]
        self._result, self._output = private / f"{entry.name}.result.json", private / f"{entry.name}.txt"
        self._result.unlink(missing_ok=True)
        self._about = private / f"{entry.name}.json"
        result = str(self._result.resolve())
        write(self._about, {"metric": self._metric, "result": result, "prune": prune, "sweep": os.getpid()})
        self._file: IO[bytes] = self._output.open("ab")
        self._began = time.monotonic()
        #: Why no trial can have the metric, if this one says so.
        self.no_metric = ""
        command = [*prefix, sys.executable, "-m", "hocket", "train", *arguments, "--trial", str(self._about)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._file, stderr=subprocess.STDOUT, env=os.environ.copy()
        )

    def over(self, interrupted: bool) -> bool:
        """Whether the process has ended; its end is noted in the entry then."""
        code = self._process.poll()
        if code is None:
            return False
        self._file.close()
        entry = self.entry
        entry.seconds = round(entry.seconds + time.monotonic() - self._began, 1)
        result = read(self._result) if self._result.exists() else None
        if code == 0 and result is not None:
            entry.metrics = result["metrics"]
            entry.value = entry.metrics.get(self._metric)
            entry.status, entry.error = "pruned" if result["pruned"] else "finished", ""
            if entry.value is None:
                entry.status, entry.error = "failed", f"it has no {self._metric}"
        elif interrupted:
            entry.status = "interrupted"
        else:
            said = {} if result is None else result
            self.no_metric = said.get("no_metric", "")
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}{self._last_line()}"
            entry.status, entry.error = "failed", said.get("error") or self.no_metric or how
        return True

    def _last_line(self) -> str:
        """Return the last line of the output after a colon, or nothing if it is that of the plan."""
        output = self._output.read_text(encoding="utf-8", errors="replace").strip()
        plan = read(self._about).get("plan")
        return "" if plan and output.endswith(plan.strip()) else f": {(output or 'no output').splitlines()[-1][:400]}"

    def stop(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def run(
    record: Record,
    waiting: Iterator[Entry],
    prefix: list[str],
    arguments: Callable[[Entry], list[str]],
    prune: Callable[[Entry], dict[str, Any] | None],
    ended: Callable[[Entry], None],
    jobs: int,
) -> bool:
    """Run trials until none is waiting, and return whether it was interrupted.

    Control-C and SIGTERM end the trials, which write a checkpoint if they have any; the sweep is continued later.
    Raises NoMetric if the first trial that is over has no such metric: no other will.
    """
    running: list[Running] = []
    received: list[int] = []
    before = {
        each: signal.signal(each, lambda number, _: received.append(number)) for each in (signal.SIGINT, signal.SIGTERM)
    }
    until = float("inf")
    sent = 0
    try:
        while True:
            while not received and len(running) < jobs and (entry := next(waiting, None)) is not None:
                entry.status = "running"
                if entry not in record.trials:
                    record.trials.append(entry)
                record.save()
                running.append(Running(record, entry, prefix, arguments(entry), prune(entry)))
            if not running:
                return bool(received)
            for each in [each for each in running if each.over(bool(received))]:
                running.remove(each)
                record.save()
                ended(each.entry)
                _check_metric(record, each)
            if len(received) > sent:
                sent, until = len(received), time.monotonic() + PATIENCE
                # A terminal sends Control-C to the trials, too: a second signal would end them at once.
                of_terminal = received[-1] == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()
                for each in () if of_terminal and sent == 1 else running:
                    each.stop(signal.SIGTERM if sent == 1 else signal.SIGKILL)
            if time.monotonic() > until:
                for each in running:
                    each.stop(signal.SIGKILL)
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in running:
            each.stop(signal.SIGTERM)


def _check_metric(record: Record, trial: Running) -> None:
    from hocket_cli.document import suggestion

    metric, entry = record.definition["metric"], trial.entry
    said = trial.no_metric
    if entry.metrics and metric not in entry.metrics and not any(each.status == "finished" for each in record.trials):
        said = f"Trials have no metric '{metric}'. {suggestion(metric, entry.metrics)}"
    if said:
        entry.status = "interrupted"  # it runs again, with the right metric
        record.save()
        raise NoMetric(f"{said} Give it as --metric; the sweep continues with it.")


def wait_for_left(record: Record) -> None:
    """Wait while trials of a sweep that was killed still write to their checkpoints; they end soon after it."""
    until, said = time.monotonic() + PATIENCE, False
    for entry in record.trials:
        while entry.status == "running" and _in_use(record.folder / entry.name / "checkpoints"):
            if time.monotonic() > until:
                return
            if not said:
                print(f"hocket: {entry.name} of the killed sweep is still ending.", file=sys.stderr, flush=True)
            said = True
            time.sleep(0.1)


def _in_use(folder: Path) -> bool:
    try:
        FileLock(folder, "sweep").release()
    except InUse:
        return True
    return False


def attempt(folder: Path, entry: Entry, resumable: bool) -> str:
    """Return the name of the folder in which to continue a trial: the same if it can resume there, else an unused one."""
    count, name = 2, f"trial-{entry.number:03}"
    if resumable:
        return entry.name
    while os.path.lexists(folder / name):
        name, count = f"trial-{entry.number:03}-try{count}", count + 1
    return name


def values_of(entry: Entry) -> list[str]:
    """Return the overrides of a trial."""
    return [f"{key}={flow(value)}" for key, value in entry.parameters.items()]


def unfinished(record: Record, retry: bool) -> list[Entry]:
    """Return the trials to run again: those that a sweep that was interrupted or killed left, and failed ones on request."""
    return [each for each in record.trials if each.status not in OVER or (retry and each.status == "failed")]
