"""The public interface of this contract version, a line for each part: `docs/reference/stability.md` says what is promised."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import hocket_cli
from hocket.data.stateful import Stateful
from hocket.help import removal
from hocket.help.attributes import Elsewhere
from hocket.help.ours import PACKAGES
from hocket.hookspecs import SPECS, Event
from hocket.plugins import KINDS, registry
from hocket.run.joined import Joined
from hocket_checkpoints import content
from hocket_checkpoints.storage import manifest
from hocket_cli import keys, parsers
from hocket_cli.exit_codes import ExitCode
from hocket_cli.sweeps import description
from hocket_strategies.custom_loops.collectives import Collectives

FILE = Path(__file__).parent / f"surface-{registry.API}.txt"
SOURCES = Path(__file__).parent.parent.parent / "packages"
#: Modules that docs tell people to import from, each with the names of its ``__all__``, or those without an underscore.
MODULES = (
    "hocket", "hocket.errors", "hocket.plugins", "hocket.data", "hocket.checkpoints", "hocket.hookspecs", "hocket.testkit",
    "hocket.surgery",
    "hocket.schedules", "hocket.basics.time", "hocket.basics.dtensors", "hocket.basics.launch_environment", "hocket.strategies",
    "hocket.precision", "hocket.devices", "hocket_cli", "hocket_general", "hocket_general.functional", "hocket_vision",
    "hocket_vision.functional", "hocket_vision.models", "hocket_vision.datasets", "hocket_nlp", "hocket_nlp.functional",
    "hocket_strategies", "hocket_loggers", "hocket_report", "hocket_streaming", "hocket_tools", "hocket_migration",
)  # fmt: skip


def surface() -> list[str]:
    """Return the lines of all sections, in the order of the file."""
    return [line for section in SECTIONS for line in section()]


def changes(before: list[str], now: list[str]) -> str:
    """Return what to do about an interface that differs from its snapshot; empty if it does not."""
    lines = [*difflib.unified_diff(before, now, n=0)][2:]  # after a header
    differing = [f"{each[0]} {each[1:]}" for each in lines if each[0] in "+-"]
    if not differing:
        return ""
    advice = ADDED
    if any(each[0] == "-" for each in differing):
        version = ".".join(importlib.import_module("hocket").__version__.split(".")[:2])
        advice = BROKEN.format(version=version, removal=removal(version))
    return "\n".join(["The public interface is not that of its snapshot:", *differing, advice])


BROKEN = """\
A line with a minus was promised to plug-ins and scripts (docs/reference/stability.md). Keep it working with
`hocket.help.deprecated(NAME, REPLACEMENT, since="{version}")` until {removal}, announce that
in CHANGELOG.md, then: python tests/golden/write.py"""
ADDED = "Announce the additions in CHANGELOG.md, then: python tests/golden/write.py"


def names() -> Iterator[str]:
    """Yield each name that can be imported, and each public member of a class of core."""
    for module in MODULES:
        yield from _of_module(importlib.import_module(module))


def hooks() -> Iterator[str]:
    """Yield the events, actions and other hooks with their arguments, and whose result counts."""
    for spec in SPECS:
        for name, hook in vars(spec).items():
            if name[0] != "_":
                result = "the first result counts" if hook.hocket_spec["firstresult"] else "all are called"
                yield f"hook {spec.__name__}.{name}{_signature(hook)}: {result}"
    yield from (f"event {each.name} = {each.value}" for each in Event)


def kinds() -> Iterator[str]:
    """Yield the entry-point groups of plug-ins, and the names of ours."""
    yield from (f"group hocket.{registry.API}.{kind}" for kind in (*KINDS, "defaults"))
    yield from (f"plug-in {each.kind} {each.name}" for each in registry.entries() if each.dist in PACKAGES.values())


def configuration() -> Iterator[str]:
    """Yield the keys of configurations with their defaults, and the keys of sweeps."""
    for key in keys.keys().values():
        yield f"configuration {key.name}" + ("" if key.required else f" = {key.default!r}")
    yield from (f"sweep {key}" for key in description._KEYS)


def variables(sources: Iterable[str] | None = None) -> Iterator[str]:
    """Yield the environment variables of hocket's that sources name in a text of its own."""
    sources = sources or [file.read_text(encoding="utf-8") for file in SOURCES.glob("*/src/**/*.py")]
    constants = (each for source in sources for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Constant))
    texts = {each.value for each in constants if isinstance(each.value, str)}
    yield from sorted(f"variable {text}" for text in texts if re.fullmatch("HOCKET_[A-Z_]+", text))


def commands() -> Iterator[str]:
    """Yield the exit codes, and each command of ours with its arguments."""
    yield from (f"exit code {code.value} {code.name}" for code in ExitCode)
    yield f"command {hocket_cli._help().splitlines()[0].removeprefix('usage: ')}"
    for entry in registry.entries("commands"):
        if entry.dist in PACKAGES.values():
            yield from _options(parsers.parser_of(entry.name, entry.load()))


def with_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its actions, such as ``hocket plugins list``."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from with_actions(each)


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser itself, without its actions and help."""
    return [
        each for each in parser._actions if not isinstance(each, argparse._SubParsersAction) and each.dest != "help"
    ]


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for each in with_actions(parser):
        for action in arguments(each):
            allowed = "" if action.choices is None else f" of {', '.join(map(str, action.choices))}"
            yield f"command {each.prog} {'/'.join(action.option_strings) or action.dest}{allowed}"


def checkpoints() -> Iterator[str]:
    """Yield the versions of checkpoints that are written and read."""
    read = ", ".join(map(str, sorted({*manifest.UPGRADES, manifest.VERSION})))
    yield f"checkpoint format {manifest.FORMAT} {manifest.VERSION}; read: {read}"
    yield f"checkpoint content {content.VERSION}"


SECTIONS = (names, hooks, kinds, configuration, variables, commands, checkpoints)


def public(module: Any) -> dict[str, Any]:
    """Return what can be imported from a module, by name, sorted."""
    listed = hasattr(module, "__all__")
    own = [
        name for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", module.__name__) == module.__name__ and not inspect.ismodule(value)
    ]  # fmt: skip
    names = sorted(getattr(module, "__all__", own or [each for each in dir(module) if each[0] != "_"]))
    values = {name: getattr(module, name) for name in names}
    # without modules that another test has imported
    return {name: value for name, value in values.items() if listed or not inspect.ismodule(value)}


def members(cls: type) -> dict[str, Any]:
    """Return the public members of a class of core, by name, sorted."""
    unnamed = {Joined, Collectives, Stateful} & {*cls.__bases__, *Collectives.__bases__}  # which no user names
    bases = [vars(each) for each in cls.__mro__ if each in unnamed]
    found = {name: each for one in (*bases, vars(cls)) for name, each in one.items() if not isinstance(each, Elsewhere)}
    return {name: found[name] for name in sorted(found) if name[0] != "_"}


def _of_module(module: Any) -> list[str]:
    lines = []
    for name, value in public(module).items():
        lines.append(f"{module.__name__}.{name}{_signature(value)}")
        if inspect.isclass(value) and module.__name__ == "hocket":
            lines += [f"{module.__name__}.{name}.{member}{_signature(each)}" for member, each in members(value).items()]
    return lines


def _signature(value: Any) -> str:
    value = getattr(value, "__func__", value)
    if not (inspect.isroutine(value) or inspect.isclass(value)) or (inspect.isclass(value) and issubclass(value, Enum)):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    # Without annotations, which each version of Python prints in its own way.
    shown = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return re.sub(r" at 0x\w+|<class '([\w.]+)'>", r"\1", str(inspect.Signature(shown)))
