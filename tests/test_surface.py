"""The public interface is that of its snapshot in ``golden/``, and what is deprecated works, and goes in time."""

from __future__ import annotations

import argparse
import ast
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket import help as hocket_help
from hocket.errors import HocketDeprecationWarning
from hocket.hookspecs import Events
from hocket_checkpoints.storage import manifest
from hocket_cli import keys

sys.path.append(str(Path(__file__).parent / "golden"))

import surface


def test_the_public_interface_is_that_of_its_snapshot() -> None:
    pytest.importorskip("sklearn")
    assert not (text := surface.changes(surface.FILE.read_text().splitlines(), surface.surface())), text


# --- planted changes


def _hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch_end(self: Any, state: Any, seconds: float) -> None: ...

    batch_end.hocket_spec = Events.batch_end.hocket_spec  # type: ignore[attr-defined]
    monkeypatch.setattr(Events, "batch_end", batch_end)


def _event(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = {each.name: "step_end" if each.value == "batch_end" else each.value for each in surface.Event}
    monkeypatch.setattr(surface, "Event", Enum("Event", renamed))


def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: key for name, key in keys.keys().items() if name != "optimizer"}
    monkeypatch.setattr(keys, "keys", lambda: others)


def _exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {each.name: 3 if each.name == "MISTAKE" else each.value for each in surface.ExitCode}
    monkeypatch.setattr(surface, "ExitCode", IntEnum("ExitCode", codes))


def _option(monkeypatch: pytest.MonkeyPatch) -> None:
    before = argparse.ArgumentParser.add_argument

    def renaming(self: Any, *names: str, **options: Any) -> Any:
        return before(self, *("--as-json" if name == "--json" else name for name in names), **options)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", renaming)


def _format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", manifest.VERSION + 1)


@pytest.mark.parametrize(
    ("section", "plant", "gone"),
    [
        (surface.hooks, _hook, "- hook Events.batch_end(self, state, /)"),
        (surface.hooks, _event, "- event BATCH_END = batch_end"),
        (surface.configuration, _key, "- configuration optimizer"),
        (surface.commands, _exit_code, "- exit code 2 MISTAKE"),
        (surface.commands, _option, "- command hocket plugins list --json"),
        (surface.checkpoints, _format, "- checkpoint format hocket-checkpoint"),
    ],
)
def test_a_planted_change_is_an_error_that_names_it(
    section: Callable[[], Iterator[str]],
    plant: Callable[[pytest.MonkeyPatch], None],
    gone: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = list(section())
    assert set(before) <= set(surface.FILE.read_text().splitlines())
    assert surface.changes(before, list(section())) == ""
    plant(monkeypatch)
    text = surface.changes(before, list(section()))
    assert gone in text
    assert "hocket.help.deprecated" in text and "CHANGELOG.md" in text and "tests/golden/write.py" in text


def test_a_planted_environment_variable_is_an_error_that_names_it() -> None:
    source = 'import os\n\nos.environ.get("HOCKET_PLUGINS")'
    before, now = ([*surface.variables([each])] for each in (source, source.replace("PLUGINS", "ONLY")))
    assert "variable HOCKET_PLUGINS" in surface.FILE.read_text().splitlines()
    assert "- variable HOCKET_PLUGINS\n+ variable HOCKET_ONLY" in surface.changes(before, now)


def test_an_addition_is_announced_and_needs_no_deprecation() -> None:
    text = surface.changes(["a", "b"], ["a", "b", "c"])
    assert "+ c" in text and "CHANGELOG.md" in text and "deprecated" not in text


# --- deprecations


def _overdue(sources: Iterable[str], version: str) -> list[str]:
    """Return the names that are still deprecated in the version that removes them."""
    now = tuple(map(int, version.split(".")[:2]))
    calls = [
        call
        for source in sources
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "deprecated"
    ]
    since = [ast.literal_eval(next(each.value for each in call.keywords if each.arg == "since")) for call in calls]
    removals = [tuple(map(int, hocket_help.removal(each).split("."))) for each in since]
    return [ast.unparse(call.args[0]) for call, removal in zip(calls, removals, strict=True) if removal <= now]


def test_nothing_is_deprecated_past_its_version() -> None:
    sources = [file.read_text(encoding="utf-8") for file in surface.SOURCES.glob("*/src/**/*.py")]
    assert _overdue(sources, hocket.__version__) == [], "remove these: their two minor versions are over"


@pytest.mark.parametrize(
    ("version", "overdue"), [("0.1.0", []), ("0.2.9", []), ("0.3.0", ["'old'"]), ("1.0.0", ["'old'"])]
)
def test_a_planted_deprecation_past_its_version_is_noticed(version: str, overdue: list[str]) -> None:
    assert _overdue(["from hocket import help\nhelp.deprecated('old', 'new', since='0.1')"], version) == overdue


def test_a_deprecated_name_works_and_warns_at_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def summary(entry: Any) -> str:  # as a function of hocket's that has another name now
        hocket_help.deprecated("summary()", "text_of()", since="0.1")
        return str(entry)

    hocket_frame = {"__name__": "hocket_cli.plugin_summaries", "hocket_help": hocket_help, "Any": Any}
    ours = type(summary)(summary.__code__, hocket_frame)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ours(17) == "17"
    (warning,) = caught
    assert warning.filename == __file__ and warning.category is HocketDeprecationWarning
    assert str(warning.message) == "summary() is deprecated since hocket 0.1 and is removed in 0.3. Write text_of()."
