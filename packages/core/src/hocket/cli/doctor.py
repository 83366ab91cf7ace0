"""``hocket plugins doctor``: each plug-in imported in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hocket.cli.plugins import status
from hocket.plugins import Entry, catalog, switches

#: Libraries that should stay out until a plug-in that needs them is named.
HEAVY = (
    "torchvision", "transformers", "deepspeed", "ray", "wandb", "mlflow", "comet_ml", "tensorboard", "matplotlib", "sklearn",
    "pandas", "tensorflow", "jax",
)  # fmt: skip
TIMEOUT = 120

# torch is imported first, so that what is measured is what the plug-in adds to it.
_CHILD = """
import functools, importlib, json, sys, time
if not sys.argv[2].startswith("commands"):
    import torch
before = set(sys.modules)
start = time.perf_counter()
error = None
try:
    module, _, attribute = sys.argv[1].partition(":")
    functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
except BaseException as raised:
    error = f"{type(raised).__name__}: {raised}"
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print("\\n" + json.dumps({"ms": round((time.perf_counter() - start) * 1e3, 1), "modules": len(set(sys.modules) - before),
                        "loaded": sorted(loaded), "error": error}))
"""


def run(args: argparse.Namespace) -> int:
    """Examine everything; 1 if something is wrong."""
    allowed = switches.current()
    entries = catalog.entries(args.kind)
    usable = [entry for entry in entries if status(entry, allowed) == "usable" and entry.obj is None]
    providers = Counter((entry.kind, entry.name) for entry in usable)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        probed = dict(zip(usable, pool.map(_probe, usable), strict=True))
    report = []
    for entry in entries:
        found = probed.get(entry, {})
        problems = []
        if found.get("error"):
            problems.append(f"cannot be imported: {found['error']}")
        if providers[entry.kind, entry.name] > 1:
            others = [e.dist for e in usable if (e.kind, e.name) == (entry.kind, entry.name) and e.dist != entry.dist]
            problems.append(f"also provided by {', '.join(others)}: write '{entry.dist}/{entry.name}'")
        if entry.api != catalog.API:
            problems.append(f"speaks {entry.api}, this hocket speaks {catalog.API}")
        report.append(
            {
                "kind": entry.kind, "name": entry.name, "distribution": entry.dist, "version": entry.version,
                "status": status(entry, allowed), "import_ms": found.get("ms"), "modules": found.get("modules"),
                "heavy": [name for name in found.get("loaded", ()) if name in HEAVY], "problems": problems,
            }
        )  # fmt: skip
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for line in report:
            _print(line)
    return int(any(line["problems"] for line in report))


def _probe(entry: Entry) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, entry.target, entry.kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {TIMEOUT} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"the process ended with exit code {done.returncode}: {last}"}
    return answer


def _print(line: dict[str, Any]) -> None:
    mark = "PROBLEM" if line["problems"] else "ok" if line["import_ms"] is not None else line["status"]
    cost = "" if line["import_ms"] is None else f"{line['import_ms']:8.1f} ms  {line['modules']:5d} modules"
    heavy = f"  brings {', '.join(line['heavy'])}" if line["heavy"] else ""
    print(f"{mark:<8} {line['kind']}/{line['name']} ({line['distribution']} {line['version']}) {cost}{heavy}")
    for problem in line["problems"]:
        print(f"         {problem}")
