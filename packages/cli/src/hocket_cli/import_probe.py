"""Import plug-ins, each in a process of its own, forked from one that has imported torch: as a program, and the call of it.

``python -m hocket_cli.import_probe`` reads what to import from the standard input, and writes a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from hocket.plugins import BrokenPluginError, Entry
from hocket.plugins.entry_points import AUTOLOAD

#: Prefix of the lines with a result: libraries may print when they are imported, too.
MARK = "hocket-probe:"
#: Whether processes can be forked with threads of torch and the system's libraries loaded.
_FORKS = sys.platform == "linux"


def probe(entries: Sequence[Entry], timeout: float, found: Callable[[Entry, dict[str, Any]], None]) -> None:
    """Import each plug-in, and pass its report to ``found``.

    It has ``ms``, ``modules``, ``loaded``, ``error``, and ``wrong`` for what was imported and is no plug-in of its kind.

    Commands are imported without torch, so that one that imports it shows; others after it, so that only their own imports
    are measured.
    """
    groups = [[each for each in entries if (each.kind == "commands") is commands] for commands in (True, False)]
    if not _FORKS:
        groups = [[each] for each in entries]
    lock, waiting = threading.Lock(), [each for each in groups if each]

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                group = waiting.pop()
            for entry, report in _server(group, timeout):
                with lock:
                    found(entry, report)

    threads = [threading.Thread(target=work) for _ in range(min(os.cpu_count() or 1, len(waiting)))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _server(group: Sequence[Entry], timeout: float) -> Any:
    """Yield the entries of a group with their reports, from a process that imports them."""
    command = [sys.executable, "-m", "hocket_cli.import_probe"]
    request = {"torch": group[0].kind != "commands", "timeout": timeout, "entries": [_words(each) for each in group]}
    left = dict(enumerate(group))
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8", errors="replace",
            env=os.environ | {AUTOLOAD: "0"},
        ) as server,
    ):  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        # Forked processes have deadlines of their own; this ends a server that imports torch forever.
        timer = threading.Timer(timeout * (2 + len(group)), server.kill)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(json.dumps(request))
            server.stdin.close()
        for line in server.stdout:
            if line.startswith(MARK):
                number, report = json.loads(line.removeprefix(MARK))
                yield left.pop(number), report
        server.wait()
        timer.cancel()
        errors.seek(0)
        last = (errors.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    for entry in left.values():
        yield entry, {"error": f"the process ended with exit code {server.returncode}: {last}"}


def _words(entry: Entry) -> tuple[str, ...]:
    """Return the arguments of `Entry`."""
    return entry.kind, entry.name, entry.dist, entry.version, entry.target


# --- in the process


def _serve() -> None:
    request = json.loads(sys.stdin.read())
    if request["torch"]:
        for name in ("torch", "hocket.devices", "hocket.precision", "hocket.strategies"):
            importlib.import_module(name)
    jobs = [(number, Entry(*words)) for number, words in enumerate(request["entries"])]
    if not _FORKS:
        for number, entry in jobs:
            _answer(number, _imported(entry))
        return
    sys.stdout.flush()
    running: dict[int, tuple[int, int, float, Any]] = {}
    while jobs or running:
        while jobs and len(running) < (os.cpu_count() or 1):
            number, entry = jobs.pop(0)
            reading, writing = os.pipe()
            output = tempfile.TemporaryFile()  # noqa: SIM115
            pid = os.fork()
            if not pid:
                _child(writing, output.fileno(), entry)
            os.close(writing)
            running[reading] = number, pid, time.monotonic() + request["timeout"], output
        ready, _, _ = select.select(list(running), [], [], 0.1)
        late = [each for each, (_, _, until, _) in running.items() if time.monotonic() > until]
        for reading in {*ready, *late}:
            number, pid, _, output = running.pop(reading)
            if reading not in ready:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                _answer(number, {"error": f"took more than {request['timeout']:g} s"})
            else:
                _answer(number, _report(reading, pid, output))
            os.close(reading)
            output.close()


def _child(writing: int, output: int, entry: Entry) -> None:
    """Import one plug-in in a forked process, and end it."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        report = _imported(entry)
        with os.fdopen(writing, "w", encoding="utf-8") as file:
            json.dump(report, file)
        code = 0
    finally:
        os._exit(code)


def _report(reading: int, pid: int, output: IO[bytes]) -> dict[str, Any]:
    with os.fdopen(reading, encoding="utf-8", closefd=False) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ValueError):
        report: dict[str, Any] = json.loads(text)
        return report
    output.seek(0)
    last = (output.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    return {"error": f"the process ended with exit code {os.waitstatus_to_exitcode(status)}: {last}"}


def _imported(entry: Entry) -> dict[str, Any]:
    before, start, error, wrong = set(sys.modules), time.perf_counter(), None, None
    try:
        loaded = entry.load()
        if entry.kind == "devices":
            device = loaded()
            _ = device.available(), device.priority + 0
    except BaseException as raised:
        reason = raised.__cause__ or raised
        if isinstance(reason, BrokenPluginError):  # it was imported, and is of another kind
            wrong = str(reason)
        else:
            error = f"{type(reason).__name__}: {reason}"
    ms, new = round((time.perf_counter() - start) * 1e3, 1), set(sys.modules) - before
    loaded_names = sorted({name.partition(".")[0] for name in new})
    return {"ms": ms, "modules": len(new), "error": error, "wrong": wrong, "loaded": loaded_names}


def _answer(number: int, report: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps([number, report])}", flush=True)


if __name__ == "__main__":
    _serve()
