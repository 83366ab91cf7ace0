"""``hocket plugins doctor``: import each plug-in in a separate process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hocket.cli.plugins import status
from hocket.plugins import Entry, catalog, switches
from hocket.plugins.distributions import AUTOLOAD

#: Heavy libraries, which should only be imported if a plug-in that needs them is used.
HEAVY = (
    "torchvision", "transformers", "deepspeed", "ray", "wandb", "mlflow", "comet_ml", "tensorboard", "matplotlib", "sklearn",
    "pandas", "tensorflow", "jax",
)  # fmt: skip
TIMEOUT = 120

#: Prefix of the report line of a child: imported modules may also print, during import and at exit.
_MARK = "hocket-doctor:"
# torch is imported first, so that only the additional imports of the plug-in are measured.
_CHILD = """
import json, sys, time
from hocket.plugins.catalog import Entry
if sys.argv[2] != "commands":
    import torch, hocket.devices, hocket.precision, hocket.strategies
before = set(sys.modules)
start = time.perf_counter()
error = None
try:
    loaded = Entry(sys.argv[2], "x", "x", "x", sys.argv[1]).load()
    if sys.argv[2] == "devices":
        device = loaded()
        device.available(), device.priority + 0
except BaseException as raised:
    raised = raised.__cause__ or raised
    error = f"{type(raised).__name__}: {raised}"
ms, new = round((time.perf_counter() - start) * 1e3, 1), set(sys.modules) - before
print("\\n" + sys.argv[3] + json.dumps({"ms": ms, "modules": len(new), "error": error,
    "loaded": sorted({name.partition(".")[0] for name in new})}), flush=True)
"""


def run(args: argparse.Namespace) -> int:
    """Check all plug-ins and return 1 if there are problems, else 0."""
    allowed = switches.current()
    entries = catalog.entries(args.kind)
    usable = [entry for entry in entries if status(entry, allowed) == "usable" and entry.obj is None]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        probed = dict(zip(usable, pool.map(_probe, usable), strict=True))
    report = []
    for entry in entries:
        found = probed.get(entry, {})
        report.append(
            {
                "kind": entry.kind, "name": entry.name, "distribution": entry.dist, "version": entry.version,
                "status": status(entry, allowed), "import_ms": found.get("ms"), "modules": found.get("modules"),
                "heavy": [name for name in found.get("loaded", ()) if name in HEAVY],
                "problems": _problems(entry, found.get("error"), usable),
            }
        )  # fmt: skip
    for dist, version, text in catalog.installed().problems:
        report.append(
            {
                "kind": "distributions", "name": dist or "unknown", "distribution": dist, "version": version,
                "status": "skipped", "import_ms": None, "modules": None, "heavy": [], "problems": [text],
            }
        )  # fmt: skip
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for line in report:
            _print(line)
    return int(any(line["problems"] for line in report))


def _problems(entry: Entry, error: str | None, usable: list[Entry]) -> list[str]:
    """Return the problems of an entry, each with a remedy."""
    leave = f"upgrade or uninstall {entry.dist}, or set HOCKET_DISABLE_PLUGINS=dist:{entry.dist}"
    problems = [f"cannot be used: {entry.problem}"] if entry.problem else []
    if error:
        problems.append(f"cannot be used: {error}. Install its missing dependencies, {leave}")
    others = [e.dist for e in usable if (e.kind, e.name) == (entry.kind, entry.name) and e.dist != entry.dist]
    if entry in usable and catalog.CORE in others:
        problems.append(f"'{entry.name}' is a plug-in of hocket: write '{entry.dist}/{entry.name}' for this one")
    elif entry in usable and others and entry.dist != catalog.CORE:
        problems.append(f"also provided by {', '.join(others)}: write '{entry.dist}/{entry.name}'")
    if entry.api != catalog.API:
        problems.append(f"has plug-in API {entry.api}, and this hocket has {catalog.API}; upgrade one of them")
    return problems


def _probe(entry: Entry) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, entry.target, entry.kind, _MARK]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace", timeout=TIMEOUT,
            check=False, env=os.environ | {AUTOLOAD: "0"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {TIMEOUT} s"}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return answer
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": f"the process ended with exit code {done.returncode}: {last}"}


def _print(line: dict[str, Any]) -> None:
    mark = "PROBLEM" if line["problems"] else "ok" if line["import_ms"] is not None else line["status"]
    cost = "" if line["import_ms"] is None else f"{line['import_ms']:8.1f} ms  {line['modules']:5d} modules"
    heavy = f"  imports {', '.join(line['heavy'])}" if line["heavy"] else ""
    print(f"{mark:<8} {line['kind']}/{line['name']} ({line['distribution']} {line['version']}) {cost}{heavy}")
    for problem in line["problems"]:
        print(f"         {problem}")
