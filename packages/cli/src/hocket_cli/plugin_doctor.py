"""Check the installed plug-ins, as ``hocket plugins doctor`` prints it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hocket.basics.kinds import HEAVY
from hocket.help.ours import PARTS
from hocket.plugins import Entry, registry, switches
from hocket_cli import compatibility
from hocket_cli.import_probe import probe
from hocket_cli.plugins import status

#: Heavy libraries, which should only be imported if a plug-in that needs them is used.
#: Seconds that the import of one plug-in may take.
TIMEOUT = 120.0


def run(args: argparse.Namespace) -> int:
    """Check all plug-ins and return 1 if there are problems, else 0."""
    report = examine(args.kind)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for line in report:
            _print(line)
    return int(any(line["problems"] for line in report))


def examine(kind: str | None = None, timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """Import each plug-in in its own process, show progress, and return a report of each."""
    allowed = switches.current()
    entries = registry.entries(kind)
    usable = [entry for entry in entries if status(entry, allowed) == "usable" and entry.obj is None]
    probed: dict[Entry, dict[str, Any]] = {}
    shows = sys.stderr.isatty()
    if not shows:
        print(f"hocket: importing {len(usable)} plug-ins, each in a process of its own", file=sys.stderr, flush=True)

    def note(entry: Entry, answer: dict[str, Any]) -> None:
        probed[entry] = answer
        if shows:
            print(f"\r{len(probed)} of {len(usable)} plug-ins imported", end="", file=sys.stderr, flush=True)

    probe(usable, timeout, note)
    if shows:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    report = []
    for entry in entries:
        found = probed.get(entry, {})
        report.append(
            {
                "kind": entry.kind, "name": entry.name, "distribution": entry.dist, "version": entry.version,
                "api": entry.api, "requires": compatibility.required(entry.dist),
                "status": status(entry, allowed), "import_ms": found.get("ms"), "modules": found.get("modules"),
                "heavy": [name for name in found.get("loaded", ()) if name in HEAVY],
                "problems": _problems(entry, found, usable),
            }
        )  # fmt: skip
    for dist, version, text in registry.installed().problems:
        report.append(
            {
                "kind": "distributions", "name": dist or "unknown", "distribution": dist, "version": version,
                "api": "", "requires": "", "status": "skipped", "import_ms": None, "modules": None, "heavy": [],
                "problems": [text],
            }
        )  # fmt: skip
    return report


def _problems(entry: Entry, found: dict[str, Any], usable: list[Entry]) -> list[str]:
    """Return the problems of an entry, each with a remedy."""
    leave = f"upgrade or uninstall {entry.dist}, or set HOCKET_DISABLE_PLUGINS=dist:{entry.dist}"
    problems = [f"cannot be used: {entry.problem}"] if entry.problem else []
    if wrong := found.get("wrong"):
        problems.append(f"{wrong} To ignore it, set HOCKET_DISABLE_PLUGINS=dist:{entry.dist}.")
    if error := found.get("error"):
        problems.append(f"cannot be used: {error.rstrip('.')}. Install its missing dependencies, {leave}")
    others = [e.dist for e in usable if (e.kind, e.name) == (entry.kind, entry.name) and e.dist != entry.dist]
    if entry in usable and not PARTS.keys().isdisjoint(others):
        problems.append(f"'{entry.name}' is a plug-in of hocket: write '{entry.dist}/{entry.name}' for this one")
    elif entry in usable and others and entry.dist not in PARTS:
        problems.append(f"also provided by {', '.join(others)}: write '{entry.dist}/{entry.name}'")
    problems += filter(None, (registry.another_api(entry), compatibility.mismatch(entry.dist)))
    return problems


def _print(line: dict[str, Any]) -> None:
    mark = "PROBLEM" if line["problems"] else "ok" if line["import_ms"] is not None else line["status"]
    cost = "" if line["import_ms"] is None else f"{line['import_ms']:8.1f} ms  {line['modules']:5d} modules"
    heavy = f"  imports {', '.join(line['heavy'])}" if line["heavy"] else ""
    versions = f", API {line['api']}" if line["api"] else ""
    versions += f", for hocket{line['requires']}" if line["requires"] else ""
    print(f"{mark:<8} {line['kind']}/{line['name']} ({line['distribution']} {line['version']}{versions}) {cost}{heavy}")
    for problem in line["problems"]:
        print(f"         {problem}")
