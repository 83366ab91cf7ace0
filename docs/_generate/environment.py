"""The pages of environment variables and of exit codes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import surface
from markup import code, module_of, page, plain, sources, table

from hocket_cli.exit_codes import ExitCode


def pages(folder: Path) -> dict[str, str]:
    """Return the pages by name."""
    own = [line.removeprefix("variable ") for line in surface.variables()]
    others = {name: modules for name, modules in sorted(_read().items()) if name not in own}
    return {
        "environment-variables": page(
            "Environment variables",
            "Look up here which environment variables change what hocket does.",
            "## Variables of hocket",
            table(["variable", "meaning"], ([code(name), meaning(name)] for name in own)),
            "## Variables of launchers and libraries",
            "hocket reads these, which others set.",
            table(["variable", "read in"], ([code(name), "; ".join(each)] for name, each in others.items())),
        ),
        "exit-codes": page(
            "Exit codes",
            "Look up here what the exit code of a `hocket` command says, to decide in a script or scheduler what to do next.",
            table(
                ["code", "name", "meaning"], ([str(each.value), code(each.name), _comment(each)] for each in ExitCode)
            ),
        ),
    }


def meaning(variable: str) -> str:
    """Return what docstrings and comments say of an environment variable."""
    return "; ".join(
        dict.fromkeys(each for text in sources().values() if variable in text for each in _said(text, variable))
    )


def _said(source: str, variable: str) -> Iterator[str]:
    """Yield the item, or the comment, in which a source explains a variable."""
    docstrings = (
        ast.get_docstring(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    items = (item for text in docstrings if text for item in re.split(r"\n\s*\n|\n(?=\s*\* )|\n(?=    \w+: )", text))
    comments = (
        comment.replace("#:", "") + assigned
        for comment, assigned in re.findall(r"((?:^ *#: .*\n)+)(.*)", source, re.MULTILINE)
    )
    for text in items:
        if re.search(rf"\b{variable}\b", text):
            yield plain(text)
    for text in comments:
        if re.search(rf"\b{variable}\b", text):
            yield plain(text.rpartition("\n")[0])


def _read() -> dict[str, list[str]]:
    """Return the environment variables that sources read, with the first lines of the modules that read them."""
    found: dict[str, list[str]] = {}
    for file, source in sources().items():
        if "/hocket_migration/" in file.as_posix():
            continue  # what it reads is of the frameworks that it stands in for
        if not re.search("environ|variables|getenv", source):
            continue
        tree = ast.parse(source)
        where = f"`{module_of(file)}`: {plain((ast.get_docstring(tree) or '').partition(chr(10))[0])}"
        for name in sorted({name for node in ast.walk(tree) for name in _variables(node)}):
            found.setdefault(name, []).append(where)
    return found


def _variables(node: ast.AST) -> Iterator[str]:
    """Yield the names that an expression looks up in the environment."""
    if isinstance(node, ast.Call):
        looked_up = (node.func, *node.args)
    elif isinstance(node, ast.Subscript):
        looked_up = (node.value, node.slice)
    elif isinstance(node, ast.Compare):
        looked_up = (node.left, *node.comparators)
    else:
        return
    if any(re.fullmatch(r"(os\.)?(environ|variables)(\.\w+)?|os\.getenv", ast.unparse(each)) for each in looked_up):
        for each in looked_up:
            if isinstance(each, ast.Constant) and re.fullmatch("[A-Z][A-Z0-9_]+", str(each.value)):
                yield str(each.value)


def _comment(code: ExitCode) -> str:
    """Return the comment above the definition of an exit code."""
    found = re.search(rf"((?:^ *#: .*\n)+) *{code.name} = ", inspect.getsource(ExitCode), re.MULTILINE)
    return plain(found[1].replace("#:", "")) if found else ""
