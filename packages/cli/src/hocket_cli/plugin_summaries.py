"""Summaries of plug-ins, read from their source files without importing them."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import re
import sys
from importlib.util import resolve_name
from pathlib import Path

from hocket.plugins import Entry

#: How the definition of a plug-in begins.
_STARTS = "class {0}(|class {0}:|class {0}[|def {0}(|{0} = "
#: A class or function that begins with a docstring in triple quotes, up to the end of that.
_DOCSTRING = re.compile(r'(?:class|def) [^"#]*?:\n\s+r?"""(?:[^\\]|\\.)*?"""', re.DOTALL)


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
    text = "\n" + file.read_text(encoding="utf-8")
    # torch documents its optimizers by assignment, after the class.
    if f"\n{attribute}.__doc__ = " in text:
        assigned = re.search(rf'^{attribute}\.__doc__ = \(?\s*r?"""\s*(.+)', text, re.MULTILINE)
        if assigned is not None:
            return assigned[1]
    starts = (text.find(f"\n{start}") for start in _STARTS.format(attribute).split("|"))
    start = min((each for each in starts if each >= 0), default=None)
    if start is None:
        imported = re.search(rf"^from ([\w.]+) import .*\b{attribute}\b", text, re.MULTILINE)
        package = module if file.stem == "__init__" else module.rpartition(".")[0]
        return "" if imported is None else _documented(resolve_name(imported[1], package), attribute)
    # Parse this definition only, and of a class or function only up to its docstring: there may be many plug-ins.
    definition = text[start + 1 :]
    if (docstring := _DOCSTRING.match(definition)) is not None:
        definition = docstring[0]
    else:
        lines = definition.splitlines(keepends=True)
        end = next((i for i, line in enumerate(lines[1:], 1) if line.strip() and line[0] not in " \t)#"), None)
        definition = "".join(lines[:end])
    node = ast.parse(definition).body[0]
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node) or ""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):  # such as Command("what it does", …)
        given = [*node.value.args[:1], *(each.value for each in node.value.keywords if each.arg == "summary")]
        return next(
            (each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)), ""
        )
    return ""


def _find(module: str) -> Path | None:
    """Return the source file of a module, without importing it."""
    spec = _spec(module)
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


@functools.cache
def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module, whose parent packages are located one by one, without importing them."""
    path: list[str] | None = None
    if parent := module.rpartition(".")[0]:
        package = _spec(parent)
        if package is None:
            return None
        path = list(package.submodule_search_locations or [])
    found = (finder.find_spec(module, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((each for each in found if each is not None), None)
