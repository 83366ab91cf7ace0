"""Check an installed plug-in with the suite of its kind, in processes of their own, and give it a tier."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.errors import MissingPackage
from hocket.plugins import catalog

#: The checks of the higher tiers; all others are bronze.
TIERS = {
    "silver": (
        "test_works_with_microbatches", "test_works_in_bf16", "test_works_on_two_ranks", "test_does_not_depend_on_the_rank",
    ),
    "gold": ("test_works_in_every_combination", "test_has_a_card", "test_has_evidence", "test_names_its_source"),
}  # fmt: skip


@dataclass(frozen=True)
class Check:
    """The outcome of one check: ``passed``, ``failed`` or ``skipped``, with the fault or the reason."""

    name: str
    outcome: str
    message: str = ""

    @property
    def tier(self) -> str:
        """The tier that needs it."""
        return next((tier for tier, names in TIERS.items() if f"test_{self.name.replace(' ', '_')}" in names), "bronze")


@dataclass
class Result:
    """The checks of one plug-in."""

    kind: str
    name: str
    distribution: str
    version: str
    checks: list[Check] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.outcome == "failed"]

    @property
    def tier(self) -> str:
        """The highest tier of which it and all lower ones have no failed check; ``none`` if a check of bronze failed."""
        failed = {check.tier for check in self.failed}
        reached = "none"
        for tier in ("bronze", *TIERS):
            if tier in failed:
                break
            reached = tier
        return reached

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data, as ``hocket plugins check --json`` prints it."""
        checks = [{"name": each.name, "outcome": each.outcome, "message": each.message} for each in self.checks]
        return {
            "kind": self.kind, "name": self.name, "distribution": self.distribution, "version": self.version,
            "tier": self.tier, "checks": checks,
        }  # fmt: skip


def check(
    kind: str, name: str, *, timeout: float = 120.0, note: Callable[[Check], None] = lambda check: None
) -> Result:
    """Run every check of a plug-in's suite on the installed plug-in, and return the outcomes.

    Args:
        kind: one of `hocket.plugins.KINDS`.
        name: its name, or ``distribution/name``.
        timeout: seconds that one check may take. One that takes longer, or ends the process, has failed; the others follow in
            a new process.
        note: is called with each outcome as it is known.

    Raises:
        hocket.plugins.PluginError: there is no such plug-in.
        hocket.errors.MissingPackage: pytest is not installed.

    Example:
        >>> from hocket_testkit.check import check
        >>> result = check("schedules", "constant")  # doctest: +SKIP
        >>> result.tier  # doctest: +SKIP
        'gold'
    """
    if importlib.util.find_spec("pytest") is None:
        raise MissingPackage(
            "Checks of plug-ins run with pytest, which is not installed here. Type: pip install pytest."
        )
    entry = catalog.find(kind, name)
    result = Result(kind, entry.name, entry.dist, entry.version)
    done: dict[str, Check] = {}
    with tempfile.TemporaryDirectory() as folder:
        while True:
            outcomes, unfinished = _session(kind, f"{entry.dist}/{entry.name}", Path(folder), list(done), timeout)
            for test, outcome, message in [*outcomes, *unfinished]:
                before = done.get(test)
                if before is None or (before.outcome != "failed" and outcome != "passed"):
                    done[test] = Check(test.removeprefix("test_").replace("_", " "), outcome, message)
            if not unfinished or unfinished[0][0] == "test_can_be_made":
                break
    result.checks += done.values()
    for each in result.checks:
        note(each)
    return result


_Outcome = tuple[str, str, str]


def _session(
    kind: str, name: str, folder: Path, done: list[str], timeout: float
) -> tuple[list[_Outcome], list[_Outcome]]:
    """Run the checks that are not done in a process; return outcomes, and the failed one of a check that did not end."""
    file = folder / "checks.jsonl"
    file.write_text("")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "hocket_testkit.session", kind, name, str(folder), *done]
    with (folder / "output.txt").open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )  # fmt: skip
        size, since, late = -1, time.monotonic(), False
        while process.poll() is None:
            time.sleep(0.05)
            if (now := file.stat().st_size) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > timeout:
                late = True
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        last = (output.read().strip().splitlines() or [""])[-1]
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    outcomes = [(line["name"], line["outcome"], line["message"]) for line in lines if "name" in line]
    begun = lines[-1]["begin"] if lines and "begin" in lines[-1] else None
    if begun is None:
        return outcomes, []
    fault = (
        f"It did not end within {timeout:g} s."
        if late
        else f"It ended the process, with exit code {process.returncode}. The last line of its output: {last[:300]}"
    )
    return outcomes, [(begun, "failed", fault)]
