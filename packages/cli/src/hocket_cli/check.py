"""Run the conformance suite on installed plug-ins, as ``hocket plugins check`` prints it."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from typing import Any

from hocket.help import optional_packages
from hocket.help.ours import PACKAGES
from hocket.plugins import Entry, PluginError, registry, switches
from hocket.plugins.entry_points import normal
from hocket_cli.plugins import kinds_of, status


def run(args: argparse.Namespace) -> int:
    """Check the named plug-ins, or all that are not hocket's own; return 1 if a check fails, else 0."""
    kit = optional_packages.module("hocket_testkit.check", "hocket plugins check")
    entries = _named(args.names, args.kind) if args.names else _strangers(args.kind)
    results = []
    for entry in entries:
        if not args.json:
            print(f"{entry.kind}/{entry.name} ({entry.dist} {entry.version})", flush=True)
        note = _progress if args.json else functools.partial(_print, dict[str, str]())
        result = kit.check(entry.kind, f"{entry.dist}/{entry.name}", timeout=args.timeout, note=note)
        results.append(result)
        if not args.json:
            print(_verdict(result, kit.TIERS), end="\n\n", flush=True)
    if args.json:
        print(json.dumps({"plugins": [result.as_json() for result in results]}, indent=1))
    return int(any(result.failed for result in results))


def _named(names: list[str], kind: str | None) -> list[Entry]:
    """Return the entries of names; a name that several kinds have stands for all of them."""
    return [registry.find(each, name) for name in names for each in kinds_of(name, kind)]


def _strangers(kind: str | None) -> list[Entry]:
    allowed = switches.current()
    entries = [
        entry
        for entry in registry.entries(kind)
        if normal(entry.dist) not in PACKAGES.values() and status(entry, allowed) == "usable"
    ]
    if not entries:
        raise PluginError(
            "No plug-in is installed beside hocket's own. Name one of those, such as `hocket plugins check ema`; `hocket "
            "plugins list` shows all."
        )
    return entries


def _print(said: dict[str, str], check: Any) -> None:
    """Print the line of a check; ``said`` are the messages until now, by which a repeated one names the first check."""
    first = said.setdefault(check.message, check.name)
    message = check.message if first == check.name else f"as '{first}'"
    print(f"  {check.outcome:<8} {check.name}{f': {message}' if check.message else ''}", flush=True)


def _progress(check: Any) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{check.outcome} {check.name}", end="", file=sys.stderr, flush=True)


def _verdict(result: Any, tiers: dict[str, Any]) -> str:
    """Return the line with the tier, and what the next tier needs."""
    order = ("none", "bronze", *tiers)
    if result.tier == order[-1]:
        return f"  {result.tier}: {len(result.checks)} checks"
    following = order[order.index(result.tier) + 1]
    missing = ", ".join(f"'{each.name}'" for each in result.lacking(following))
    return f"  {result.tier}: {following} needs {missing}"
