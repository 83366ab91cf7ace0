"""Check an installed plug-in with the suite of its kind, in processes of their own, and give it a tier."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.errors import MissingPackage, WrongValue
from hocket.plugins import registry

#: The checks of the higher tiers; all others are bronze.
TIERS = {
    "silver": (
        "test_works_with_microbatches", "test_works_in_bf16", "test_works_on_two_ranks", "test_does_not_depend_on_the_rank",
    ),
    "gold": ("test_works_in_every_combination", "test_has_a_card", "test_has_evidence", "test_names_its_source"),
}  # fmt: skip


#: Seconds more until the first check of a process begins: torch has to be imported.
_START = 120.0
#: The check that ends when the others begin; and that which a later process fails before they do, or between them.
_CAN_BE_MADE, _TO_THE_END = "test_can_be_made", "test_can_be_checked_to_the_end"


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

    def lacking(self, tier: str) -> list[Check]:
        """Return the checks that keep it from a tier: failed ones, and for gold skipped ones of gold and untried ones, too."""
        failed = [each for each in self.checks if each.tier == tier and each.outcome == "failed"]
        skipped = [each for each in self.checks if each.tier == tier or each.message.startswith("not tried: ")]
        return failed + [each for each in skipped if tier == "gold" and each.outcome == "skipped"]

    @property
    def tier(self) -> str:
        """The highest tier that nothing keeps it from, nor from those below; ``none`` if a check of bronze failed."""
        reached = "none"
        for tier in ("bronze", *TIERS):
            if self.lacking(tier):
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
        kind: one of ``hocket.plugins.KINDS``.
        name: its name, or ``distribution/name``.
        timeout: seconds that one check may take. One that takes longer, or ends the process, has failed; the others follow in
            a new process.
        note: is called with each outcome as it is known.

    Raises:
        hocket.plugins.PluginError: there is no such plug-in.
        hocket.errors.MissingPackage: pytest is not installed.
        hocket.errors.WrongValue: ``timeout`` is not positive.

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
    if not timeout > 0:
        raise WrongValue(
            f"timeout={timeout:g} leaves no time for a check. Give a positive number of seconds, such as 120."
        )
    entry = registry.find(kind, name)
    result = Result(kind, entry.name, entry.dist, entry.version)
    with tempfile.TemporaryDirectory() as folder:
        session = _Session(kind, f"{entry.dist}/{entry.name}", Path(folder), timeout, note)
        with _ended_by_exception():
            while session.run():
                pass
    if [each.name for each in session.checks] == ["can be made"] and not session.checks[0].message:
        session.checks[0] = Check("can be made", "failed", "No check ran: pytest found none in its suite.")
    result.checks += session.checks
    return result


class _Session:
    """The checks of a plug-in, each begun once, in one process after another."""

    def __init__(self, kind: str, name: str, folder: Path, timeout: float, note: Callable[[Check], None]) -> None:
        self._command = [sys.executable, "-m", "hocket_testkit.session", kind, name, str(folder)]
        self._folder, self._timeout, self._note = folder, timeout, note
        self._file = folder / "checks.jsonl"
        #: By the name of the test: the outcomes of its cases.
        self._outcomes: dict[str, list[tuple[str, str]]] = {}
        self.checks: list[Check] = []

    def run(self) -> bool:
        """Run the checks that are not done in a process. Return whether it ended within one, so that others are left."""
        self._file.write_text("")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        with (self._folder / "output.txt").open("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [*self._command, *self._outcomes], cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
                env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            try:
                late, begun = self._follow(process)
            finally:
                _kill(process)
            output.seek(0)
            last = (output.read().strip().splitlines() or ["nothing"])[-1]
        if begun:
            seconds = self._timeout + (_START if begun == _CAN_BE_MADE else 0)
            fault = f"It ended the process, with exit code {process.returncode}; the last output is: {last[:300]}"
            self._add(begun, "failed", f"It did not end within {seconds:g} s." if late else fault)
        self._finish(len(self._outcomes))
        return bool(begun) and begun != _CAN_BE_MADE

    def _follow(self, process: subprocess.Popen[Any]) -> tuple[bool, str]:
        """Read outcomes until the last one, or the process ends, or one takes too long.

        Returns whether one took too long, and the check that had begun, empty after the last one.
        """
        begun, since, allowed, half = "", time.monotonic(), self._timeout + _START, ""
        with self._file.open(encoding="utf-8") as file:
            while True:
                ended = process.poll() is not None
                *lines, half = (half + file.read()).split("\n")  # the last one may be written in part
                for line in lines:
                    since, given = time.monotonic(), json.loads(line)
                    if "end" in given:
                        return False, ""
                    begun = given.get("begin", "")
                    allowed = self._timeout + (_START if _CAN_BE_MADE in given.values() else 0)
                    if not begun:
                        self._add(given["name"], given["outcome"], given["message"])
                    self._finish(len(self._outcomes) - 1)
                late = time.monotonic() - since > allowed
                if ended or late:
                    return not ended, begun or _CAN_BE_MADE
                time.sleep(0.05)

    def _add(self, test: str, outcome: str, message: str) -> None:
        if test == _CAN_BE_MADE and test in self._outcomes:
            if outcome == "passed":
                return
            test = _TO_THE_END
        self._outcomes.setdefault(test, []).append((outcome, message))

    def _finish(self, number: int) -> None:
        """Note the first ``number`` checks, of which all cases are done: the first failed case counts, then a skipped one."""
        for test in list(self._outcomes)[len(self.checks) : number]:
            cases = self._outcomes[test]
            outcome, message = min(cases, key=lambda case: ("failed", "skipped", "passed").index(case[0]))
            self.checks.append(Check(test.removeprefix("test_").replace("_", " "), outcome, message))
            self._note(self.checks[-1])


@contextlib.contextmanager
def _ended_by_exception() -> Iterator[None]:
    """Let the signals that end a process raise SystemExit, so that the process of the checks is ended, too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    mine = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if mine and hasattr(signal, name)]
    before = {each: signal.signal(each, end) for each in numbers if signal.getsignal(each) is signal.SIG_DFL}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _kill(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
