"""Summaries of plug-ins, read from their source files without importing them."""

from __future__ import annotations

import ast
import importlib.machinery
import re
import sys
from importlib.util import resolve_name
from pathlib import Path

from hocket.plugins import Entry


def summary(entry: Entry) -> str:
    """Return the first line of the docstring, or the first argument of an instance; empty if the source does not show it.

    Roles and backquotes of reStructuredText are removed.
    """
    try:
        text = (entry.obj.__doc__ or "") if entry.obj is not None else _documented(*entry.target.split(":"))
        return re.sub(r":\w+:(?=`)|`+~?", "", text.strip().partition("\n")[0])
    except Exception:  # the source cannot be found, read or parsed
        return ""


def _documented(module: str, attribute: str) -> str:
    file = _find(module)
    if file is None:
        return ""
    text = file.read_text(encoding="utf-8")
    # torch documents its optimizers by assignment, after the class.
    assigned = re.search(rf'^{attribute}\.__doc__ = \(?\s*r?"""\s*(.+)', text, re.MULTILINE)
    if assigned is not None:
        return assigned[1]
    found = re.search(rf"^(class {attribute}\b|def {attribute}\(|{attribute} = )", text, re.MULTILINE)
    if found is None:
        imported = re.search(rf"^from ([\w.]+) import .*\b{attribute}\b", text, re.MULTILINE)
        package = module if file.stem == "__init__" else module.rpartition(".")[0]
        return "" if imported is None else _documented(resolve_name(imported[1], package), attribute)
    # Parse only this definition and not the full file, for speed: there may be many plug-ins.
    definition = text[found.start() :].splitlines(keepends=True)
    end = next((i for i, line in enumerate(definition[1:], 1) if line.strip() and line[0] not in " \t)#"), None)
    node = ast.parse("".join(definition[:end])).body[0]
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node) or ""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):  # such as Command("what it does", …)
        given = [*node.value.args[:1], *(each.value for each in node.value.keywords if each.arg == "summary")]
        return next(
            (each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)), ""
        )
    return ""


def _find(module: str) -> Path | None:
    """Return the source file of a module. Locate its parent packages one by one, without importing them."""
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
