"""What a plug-in says about itself, read from its source: nothing is imported."""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from pathlib import Path

from hocket.plugins import Entry


def summary(entry: Entry) -> str:
    """The first line of the docstring, or empty where the source does not show it."""
    if entry.obj is not None:
        return (entry.obj.__doc__ or "").strip().partition("\n")[0]
    module, _, attribute = entry.target.partition(":")
    file = _find(module)
    if file is None:
        return ""
    try:
        text = file.read_text(encoding="utf-8")
        start = next((text.index(key) for key in (f"\nclass {attribute}", f"\ndef {attribute}(") if key in text), None)
        if start is None:
            return ""
        # One definition is parsed and not the file: there may be many plug-ins.
        definition = text[start + 1 :].splitlines(keepends=True)
        end = next((i for i, line in enumerate(definition[1:], 1) if line.strip() and line[0] not in " \t)#"), None)
        node = ast.parse("".join(definition[:end])).body[0]
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ""
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _find(module: str) -> Path | None:
    """The source file of a module; its packages are located one inside the other, and not run."""
    path: list[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    for depth in range(1, module.count(".") + 2):
        name = ".".join(module.split(".")[:depth])
        found = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None
