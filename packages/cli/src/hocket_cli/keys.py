"""The keys of a configuration: the Trainer's arguments and ``data``, with their documentation, read without importing torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.basics.kinds import KINDS, singular

#: The keys that take a list of plug-ins.
LISTS = ("algorithms", "callbacks", "loggers")
#: The kind of plug-in that a key takes; no key takes commands, or formats, which are options of a data set.
KIND_OF_KEY = {"data": "datasets"} | {
    kind if kind in LISTS else singular(kind): kind for kind in KINDS if kind not in ("commands", "datasets", "shards")
}

_DATA = (
    'a plug-in of kind datasets, such as digits or {digits: {batch_size: 64}}, whose splits "train" and "test" are '
    "train_data and eval_data; or a function of the split by import path; or a hocket.data.DataModule by import path, such as "
    "{module:Class: {batch_size: 64}}. It stands instead of train_data and eval_data."
)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a configuration."""

    name: str
    #: From the Trainer's docstring, in one paragraph.
    documentation: str
    default: Any = None
    required: bool = False


@functools.cache
def keys() -> dict[str, Key]:
    """Return the keys by name, in the order of the Trainer's signature; ``data`` stands before ``train_data``."""
    spec = importlib.util.find_spec("hocket.run.trainer")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    trainer = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Trainer")
    init = next(each for each in trainer.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    documented = arguments_of(ast.get_docstring(trainer) or "")
    given = init.args
    named = [*given.args[1:], *given.kwonlyargs]
    defaults = [None] * (len(given.args) - 1 - len(given.defaults)) + [*given.defaults] + given.kw_defaults
    found: dict[str, Key] = {}
    for argument, default in zip(named, defaults, strict=True):
        if argument.arg == "train_data":
            found["data"] = Key("data", _DATA)
        if argument.arg == "data":
            continue  # it takes more here than in Python
        value = [] if argument.arg in LISTS else None if default is None else ast.literal_eval(default)
        found[argument.arg] = Key(argument.arg, documented.get(argument.arg, ""), value, default is None)
    return found


def arguments_of(docstring: str) -> dict[str, str]:
    """Return the documentation of each argument in the section ``Args:`` of a docstring, without markup."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
    found: dict[str, str] = {}
    for names, text in re.findall(
        r"^    (\S[^:\n]*): (.*?)(?=^    \S|\Z)", section[1] if section else "", re.DOTALL | re.MULTILINE
    ):
        for name in names.split(", "):
            found[name.strip()] = unmarked(" ".join(text.split()))
    return found


def unmarked(text: str) -> str:
    """Return text of a docstring without its markup, and with the constants of YAML."""
    text = re.sub(r":\w+:`~?([^`]*)`|``([^`]*)``|`([^`]*)`", lambda found: next(filter(None, found.groups()), ""), text)
    return re.sub(r"\b(None|True|False)\b", lambda found: {"None": "null"}.get(found[0], found[0].lower()), text)
