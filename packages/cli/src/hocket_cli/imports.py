"""Import paths in a configuration: ``module:name``, ``{module:name: {…}}`` or ``{class_path: …, init_args: {…}}``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.help import installing
from hocket.help.raised import raised
from hocket_cli.document import ConfigError, Node, flow, suggestion

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_PATH = re.compile(rf"{_NAME}:{_NAME}")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
#: Where a recorded configuration found the modules that its run did not install, for messages.
RECORDED: dict[str, list[str]] = {}


@dataclass(frozen=True, slots=True)
class Reference:
    """An import path in a configuration, and its arguments; None if none are given."""

    path: str
    #: The place of the path.
    where: str
    arguments: Node | None


def reference(node: Node, dotted: bool = False) -> Reference | None:
    """Return the import path that a value is, or None. ``dotted``: whether ``module.name`` is one as well."""
    value = node.value
    if isinstance(value, str):
        return Reference(value, node.where, None) if _is_path(value, dotted) else None
    if not isinstance(value, dict):
        return None
    if "class_path" in value:
        for key, child in value.items():
            if key not in ("class_path", "init_args"):
                raise ConfigError(
                    child.key, f"'{key}' stands beside class_path. {suggestion(key, ['class_path', 'init_args'])}"
                )
        path = value["class_path"]
        if not isinstance(path.value, str) or not _is_path(path.value, True):
            raise ConfigError(path.where, f"class_path={path.plain()!r} is not an import path. Write module.Class.")
        return Reference(path.value, path.where, value.get("init_args") or Node({}, node.where, node.key))
    if "init_args" in value:
        typo = next(
            iter(difflib.get_close_matches("class_path", [key for key in value if isinstance(key, str)], 1)),
            "init_args",
        )
        raise ConfigError(
            value[typo].key,
            f"'{typo}' stands where class_path is missing. Write `class_path: module.Class` beside init_args.",
        )
    if "name" not in value and (write := as_call(node)):
        raise ConfigError(node.where, f"`{flow(node.plain())}` is a mapping of several keys. {write}")
    if len(value) == 1:
        ((path, arguments),) = value.items()
        if isinstance(path, str) and _is_path(path, dotted):
            given = arguments if arguments.value is not None else Node({}, arguments.where, arguments.key)
            return Reference(path, arguments.key, given)
    return None


#: Keys under which other libraries give a class, beside its arguments.
_NAMING = ("_target_", "class", "type", "name", "target", "cls", "class_name")


def as_call(node: Node, names: Container[str] = ()) -> str:
    """Return what to write for a mapping that names a class, or one of ``names``, beside its arguments; else empty.

    Such as ``{_target_: module.Net, width: 8}``, ``{name: adam, lr: 0.1}``, or ``{module:Net: , width: 8}``, whose arguments
    are not indented.
    """
    given = node.plain()
    for key, value in given.items() if isinstance(given, dict) else ():
        others = {name: each for name, each in given.items() if name != key and name not in ("_partial_", "_convert_")}
        if key in _NAMING and isinstance(value, str):
            path = value if ":" in value or key != "_target_" else ":".join(value.rpartition(".")[::2])
            if path in names or _PATH.fullmatch(path):
                return f"Write `{flow({path: others} if others else path)}`."
        if value is None and others and isinstance(key, str) and (_PATH.fullmatch(key) or key in names):
            return f"Indent {', '.join(map(str, others))} below {key}, or write `{flow({key: others})}`."
    return ""


def _is_path(text: str, dotted: bool) -> bool:
    return bool(_PATH.fullmatch(text) or (dotted and _DOTTED.fullmatch(text)))


#: What `resolve` returns instead of importing it, inside of `unread`.
UNREAD = object()
_READS: ContextVar[bool] = ContextVar("reads", default=True)


@contextmanager
def unread() -> Iterator[None]:
    """Import nothing that a configuration names inside, as for showing it."""
    token = _READS.set(False)
    try:
        yield
    finally:
        _READS.reset(token)


def reads() -> bool:
    """Whether the code that a configuration names may be used, and not only shown."""
    return _READS.get()


def resolve(found: Reference) -> Any:
    """Import what a path names. Raises ConfigError that names the module or attribute that does not exist."""
    if not reads():
        return UNREAD
    module_name, colon, attribute = found.path.partition(":")
    parts = [*module_name.split("."), *(attribute.split(".") if colon else [])]
    module, rest = _import(parts, len(module_name.split(".")) if colon else None, found)
    target: Any = module
    for name in rest:
        if not hasattr(target, name):
            what = target.__name__ if inspect.ismodule(target) or isinstance(target, type) else found.path
            near = _nearest(name, target)
            raise ConfigError(found.where, f"{what} has no '{name}'. {near}".rstrip())
        target = getattr(target, name)
    if inspect.ismodule(target):
        raise ConfigError(found.where, f"{found.path} is a module. Name a class or function in it, as module:name.")
    return target


def _nearest(name: str, target: Any) -> str:
    """Return the name in a module or class that resembles one: of those it defines itself, also in submodules, or of all."""
    inside = getattr(target, "__dict__", {})
    own = [each for each in dir(target) if not each.startswith("_") and not inspect.ismodule(inside.get(each))]
    package = f"{target.__name__ if inspect.ismodule(target) else getattr(target, '__module__', '')}."
    defined = [each for each in own if f"{getattr(inside.get(each), '__module__', '')}.".startswith(package)]
    known = suggestion(name, defined or own)
    return suggestion(name, defined, "") or suggestion(name, own, known if len(known) < 400 else "")


def _import(parts: list[str], length: int | None, found: Reference) -> tuple[Any, list[str]]:
    """Import the longest prefix that is a module, or exactly the first ``length`` parts."""
    module = None
    for end in range(1, (length or len(parts)) + 1):
        name = ".".join(parts[:end])
        try:
            missing = importlib.util.find_spec(name) is None
        except (ImportError, ValueError, AttributeError):
            missing = name not in sys.modules
        except Exception as error:
            raise ConfigError(found.where, raised(f"Importing {'.'.join(parts[: end - 1])}", error)) from error
        if missing:
            if module is None or length is not None:
                raise ConfigError(found.where, _no_module(name, module))
            return module, parts[end - 1 :]
        try:
            module = importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module that calls sys.exit too
            raise ConfigError(found.where, raised(f"Importing {name}", error)) from error
        if length is None and end == len(parts) - 1:
            return module, parts[end:]
    return module, parts[length or len(parts) :]


def _no_module(name: str, package: Any) -> str:
    if package is not None:
        return f"{package.__name__} has no module '{name.rpartition('.')[2]}'. Write module:name."
    if name in RECORDED:
        there = "".join(f", nor at {place}, where its run had it" for place in RECORDED[name][-1:])
        have = "in the folder" if there else "in the folder, or with the Python environment,"
        return f"There is no module '{name}' in {Path.cwd()}{there}. Type this command {have} that has it now."
    here = sorted(
        {each.stem for each in Path().glob("*.py")} | {each.parent.name for each in Path().glob("*/__init__.py")}
    )
    near = suggestion(name, here, f"The modules there are {', '.join(here[:8])}." if here else "")
    write = (
        ""
        if near.startswith("Did")
        else f" Write the name of its file, without .py, or type: {installing.library(name)}"
    )
    return f"There is no module '{name}' in {Path.cwd()}, and none is installed. {near}{write}".rstrip()
