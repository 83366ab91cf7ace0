"""Run the suite of one installed plug-in with pytest, in this process, and write a line of JSON for each check."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import hocket_testkit
from hocket.plugins import KINDS, Entry, registry
from hocket_testkit.cards import missing_results, stale
from hocket_testkit.conformance import parameters_of
from hocket_testkit.examples import keywords, maker
from hocket_testkit.unread_loggers import UnreadLogger

#: The entry-point group in which a distribution may name the suite of a plug-in, by the plug-in's name.
SUITES = "hocket.conformance"
_OF_KINDS = {
    "actions": "ActionsConformance",
    "algorithms": "AlgorithmConformance",
    "callbacks": "CallbackConformance",
    "commands": "CommandConformance",
    "datasets": "DatasetConformance",
    "devices": "DeviceConformance",
    "loggers": "LoggerConformance",
    "optimizers": "OptimizerConformance",
    "precisions": "PrecisionConformance",
    "schedules": "ScheduleConformance",
    "shards": "ShardsConformance",
    "strategies": "StrategyConformance",
}


class Installed:
    """Tests of a plug-in with its distribution, before those of its kind."""

    entry: Entry
    #: What the entry point names, in a list: a function would become a method.
    loaded: list[Any]

    def plugin_name(self) -> str:
        """Return the name that was asked for."""
        return self.entry.name

    def declared(self) -> Any:
        """Return what the entry point names."""
        return self.loaded[0]

    def _card(self) -> tuple[str, str]:
        """Return the method card of a checkout, or the description of the distribution."""
        module = sys.modules.get(self.entry.target.partition(":")[0])
        file = Path(getattr(module, "__file__", None) or "/")
        roots = [] if "site-packages" in file.parts else [each for each in file.parents if (each / "docs").is_dir()]
        if docs := next((root / "docs" for root in roots if (root / "pyproject.toml").is_file()), None):
            card = docs / "algorithms" / f"{self.entry.name}.md"
            pages = [card] if card.is_file() else sorted(docs.rglob("*.md"))
            return str(pages[0] if card.is_file() else docs), "\n".join(
                page.read_text(encoding="utf-8") for page in pages
            )
        described = metadata.metadata(self.entry.dist)
        text = described.get("Description") or described.get_payload()  # type: ignore[attr-defined]
        return f"the README of {self.entry.dist}", str(text or "")

    def test_has_a_card(self) -> None:
        """The README of the distribution names the plug-in and each of its arguments."""
        where, text = self._card()
        assert self.entry.name in text, (
            f"{where} does not mention {self.entry.name}. Say there what it does, with a table of its arguments; and set "
            "readme = 'README.md' in pyproject.toml, so that it is in the metadata."
        )
        names = parameters_of(self.declared()) if callable(self.declared()) else []
        missing = [name for name in names if name != "params" and not re.search(rf"\b{re.escape(name)}\b", text)]
        assert not missing, f"{where} does not mention {', '.join(missing)}. List every argument with its default."
        old = stale(text, self.entry.name, self.declared(), several=self._cards_are_shared())
        assert not old, f"{where} is out of date: {'; '.join(old)}. Write what the plug-in takes now."

    def _cards_are_shared(self) -> bool:
        """Return whether the text of `_card` may be about other plug-ins, too."""
        others = [each for kind in KINDS for each in registry.entries(kind) if each.dist == self.entry.dist]
        return len(others) > 1 and not self._card()[0].endswith(f"{self.entry.name}.md")


class Measured(Installed):
    """The same for kinds whose effect can be measured."""

    def test_has_evidence(self) -> None:
        """The card has a section of results with and without it, and the seeds; nobody repeats the measurement."""
        where, text = self._card()
        if lacking := missing_results(text):
            pytest.skip(
                f"{where} has no results that others could judge: it lacks {lacking}. Add a section `## Evidence` with what "
                "was measured: task, number of seeds, and a table of the result with and without it"
            )


def entry_of(kind: str, name: str) -> Entry:
    """Return the entry of a plug-in by its name, or ``distribution/name``."""
    return registry.find(kind, name)


def suite_of(kind: str, name: str) -> type:
    """Return the suite of a plug-in: that which its distribution declares, or that of its kind with a plug-in of the example.

    A distribution declares a suite under ``[project.entry-points."hocket.conformance"]``, as ``name = "module:Class"``, where
    the plug-in needs its own model or data, or has exemptions.
    """
    entry = entry_of(kind, name)
    obj = entry.load()
    declared = [
        each
        for each in metadata.entry_points(group=SUITES, name=entry.name)
        if each.dist is not None and each.dist.name == entry.dist
    ]
    mixin = Measured if kind in ("algorithms", "optimizers") else Installed
    suites = [suite for suite in (each.load() for each in declared) if getattr(suite, "kind", kind) == kind]
    if suites:
        return type(
            f"Test{obj.__name__}",
            (mixin, suites[0]),
            {"entry": entry, "loaded": [obj], "__module__": suites[0].__module__},
        )
    base: Any = UnreadLogger if kind == "loggers" else getattr(hocket_testkit, _OF_KINDS[kind])
    members: dict[str, Any] = {"entry": entry, "loaded": [obj], "__module__": f"{hocket_testkit.__name__}.session"}
    return type("Test", (mixin, base), members | _members(kind, entry, obj))


def _members(kind: str, entry: Entry, obj: Any) -> dict[str, Any]:
    """Return what an author would write into the suite."""
    if kind == "optimizers":
        needed = [each for each in list(inspect.signature(obj).parameters.values())[1:] if each.default is each.empty]
        return {"optimizer": {f"{entry.dist}/{entry.name}": keywords(obj) if needed else {}}}
    if kind == "commands":
        return {"make": lambda self: obj}
    if kind == "datasets":
        return {"make": lambda self: functools.partial(obj, **keywords(obj))}
    make = maker(obj)
    members: dict[str, Any] = {"make": lambda self: make()}
    if kind == "precisions":
        members["gradient_tolerance"] = 0.05  # as few bits as there may be; a declared suite demands more
    if kind == "strategies":
        members["world_size"] = 2 if obj.distributed else 1
    return members


class Recorder:
    """A plug-in of pytest that writes which check begins, and the outcome of each."""

    def __init__(self, file: Path, done: Collection[str], only: Collection[str] = ()) -> None:
        self.file, self.done, self.only = file, set(done), set(only)
        self._outcomes: dict[str, tuple[str, str]] = {}

    def write(self, **line: str) -> None:
        """Append a line, which is in the file also if the process crashes in the next moment."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave out the checks that are done."""
        items[:] = [
            each
            for each in items
            if each.originalname not in self.done and (not self.only or each.originalname in self.only)
        ]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the check that begins."""
        self.write(begin=_name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a phase, and write that of the check with its last one."""
        name = _name(report.nodeid)
        before = self._outcomes.get(name, ("passed", ""))[0]
        if before == "passed" or (before == "skipped" and report.outcome == "failed"):
            self._outcomes[name] = report.outcome, _message(report)
        if report.when == "teardown":
            outcome, message = self._outcomes.pop(name)
            self.write(name=name, outcome=outcome, message=message)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write why there is nothing to run."""
        if report.failed:
            self.write(name="test_can_be_made", outcome="failed", message=_message(report))


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2].partition("[")[0]


def _message(report: Any) -> str:
    """Return the message of an assertion, or the class and message of an exception, or the reason of a skipped test."""
    if report.outcome == "passed" or report.longrepr is None:
        return ""
    if report.outcome == "skipped":
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr).strip()
    text = text.removeprefix("AssertionError: ").partition("\nassert ")[0].partition("\n  assert")[0]
    return " ".join(text.split())[:2000] if crash is not None else " ".join(text.splitlines()[-1].split())


def run(suite: type, folder: Path, file: Path, done: Collection[str] = (), only: Collection[str] = ()) -> None:
    """Run the checks of a suite in this process, but those that are done, and write their outcomes into ``file``."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_plugin.py").write_text("import hocket_testkit.session as session\nTestPlugin = session._suite\n")
    global _suite
    _suite = suite
    # Without output of pytest itself: the last line is what the plug-in wrote before it ended the process.
    arguments = ["-s", "-p", "no:terminal", "-p", "no:cacheprovider", "--import-mode=importlib", "--strict-markers"]
    where = [f"--rootdir={folder}", f"--basetemp={folder / 'tmp'}", "-c", str(folder / "pytest.ini")]
    pytest.main([*arguments, *where, str(folder / "test_plugin.py")], plugins=[Recorder(file, done, only)])


_suite: type = object


def main(kind: str, name: str, folder: str, *done: str) -> None:
    """Run the checks of an installed plug-in; called in a process of its own by `hocket_testkit.check`."""
    file = Path(folder) / "checks.jsonl"
    here = Path(folder) / "working"  # a plug-in writes nothing into it
    here.mkdir(exist_ok=True)
    os.chdir(here)
    recorder = Recorder(file, ())
    recorder.write(begin="test_can_be_made")
    try:
        suite = suite_of(kind, name)
    except Exception as error:
        recorder.write(name="test_can_be_made", outcome="failed", message=f"{type(error).__name__}: {error}")
        return
    recorder.write(name="test_can_be_made", outcome="passed", message="")
    run(suite, Path(folder), file, done)


if __name__ == "__main__":
    sys.modules["hocket_testkit.session"] = sys.modules["__main__"]
    main(*sys.argv[1:])
    Recorder(Path(sys.argv[3]) / "checks.jsonl", ()).write(end="")
