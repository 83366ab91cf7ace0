"""What errors and warnings say in the spelling of a configuration, such as ``duration: 3ep``."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from typing import Any

from hocket.basics.masking import masked
from hocket.errors import Setting, rendered
from hocket.help import names
from hocket.plugins import registry
from hocket_cli.document import Node, flow
from hocket_cli.keys import KIND_OF_KEY


def in_yaml(said: BaseException | str, override: bool = False, options: Mapping[str, object] = {}) -> str:
    """Return the text of an error, or one with its marks, with settings as in a file: ```resume: auto```.

    Args:
        override: write settings as on the command line, ``resume=auto``.
        options: the parsed options of the command; settings of these names are written so, as ``--level 0.95``.
    """
    marked = said if isinstance(said, str) else getattr(said, "marked", None) or str(said)
    return rendered(marked, lambda setting: _option(setting, options) or spelled(setting, override))


def _option(setting: Setting, options: Mapping[str, object]) -> str:
    """Return a setting as an option of the command, with a list as it takes one; empty if it has no such option."""
    if setting.name not in options or isinstance(options[setting.name], bool):
        return ""
    value = value_in_yaml(setting.value).strip("[]").replace(", ", ",")
    return f"--{setting.name.replace('_', '-')} {value}".rstrip()


def spelled(setting: Setting, override: bool) -> str:
    """Return a setting in backquotes as a file or the command line has it, or the name alone of one without a value."""
    if not setting.value:
        return setting.name
    value = value_in_yaml(setting.value)
    return _quoted(setting.name, value, override) if setting.name else value


def as_given(node: Node, at: str) -> str:
    """Return an argument with its value as `spelled` does, without secrets."""
    number = node.text if isinstance(node.value, float) else None  # as it was written, such as 1e2
    return _quoted(at, number or flow(masked(node.plain(), *at.split("."))), node.where.startswith("'"))


def _quoted(name: str, value: str, override: bool) -> str:
    return f"`{word(f'{name}={value}') if override else f'{name}: {value}'}`"


def value_in_yaml(written: str) -> str:
    """Return a value as YAML has it: a literal of Python, the import path of a dotted name, and any function for a lambda."""
    for literal in (written, written.replace("{…}", "{'…': '…'}").replace("…", "'…'")):
        try:
            return flow(ast.literal_eval(literal))
        except (SyntaxError, ValueError):
            continue
    if path := re.fullmatch(r"([\w.]+)\.(\w+)", written):
        return ":".join(path.groups())
    return "module:function" if written.startswith("lambda ") else written


def word(text: str) -> str:
    """Return text as one word of a shell; in double quotes if it has single ones, which are easier to read so."""
    return f'"{text}"' if "'" in text and not re.search(r'["$`\\!]', text) else shlex.quote(text)


# --- names of other libraries


def key_of(name: str, value: Any, override: bool = False) -> str:
    """Return what to write for a key that another library has at the top level, or empty if it is not known."""
    text = names.listed(name, "keys") or names.listed(name, "arguments", "Trainer")
    if text is None:
        return ""
    if kind := KIND_OF_KEY.get(text.removeprefix("«").partition("=")[0]):
        value = names.alias(kind, str(value), registry.names(kind)) or value
    return in_yaml(names.filled(text, name, value, _shown(value)), override)


def _shown(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1e4 batches
    return value if isinstance(value, str | int | float) else "…"


def argument_of(target: Any, name: object, value: Any, known: Mapping[str, Any] | list[str]) -> str:
    """Return the argument of a class that another library calls ``name``, as text to write, or empty."""
    if not isinstance(name, str):
        return ""
    text = names.listed(name, "arguments", getattr(target, "__qualname__", ""))
    if text is None:
        if isinstance(value, int | float) and (unit := names.listed(name, "units")):
            value = f"{_shown(value)}{unit}"
        own = names.argument(name, known)
        return f"Write `{own}: {flow(value)}`." if own else ""
    return f"Write {in_yaml(names.filled(text, name, value, _shown(value)))}."
