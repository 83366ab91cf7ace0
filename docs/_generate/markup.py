"""Pieces of pages in MyST Markdown, and the repository that they are written from."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "packages"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; empty without rows."""
    cells = [[" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if cells else ""


def code(text: str) -> str:
    """Return text as code within a line; empty for none."""
    text = " ".join(text.split())
    fence = "``" if "`" in text else "`"
    space = " " if fence == "``" else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def plain(text: str) -> str:
    """Return text of a docstring with its roles of reStructuredText as code, in one line."""
    text = re.sub(r":\w+:`~?\.?([^`]*)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"^\* ", "", " ".join(text.split()))
    return re.sub(r"`[^`]*`|[<*_]", lambda match: match[0] if match[0][0] == "`" else f"\\{match[0]}", text)


def summary(value: object) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return plain((inspect.getdoc(value) or "").partition("\n\n")[0])


def directive(name: str, argument: str, *options: str) -> str:
    """Return a directive of Sphinx that is written in reStructuredText, as those of autodoc are."""
    lines = [f".. {name}:: {argument}", *(f"   :{option}" for option in options)]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def page(title: str, *parts: str) -> str:
    """Return a page: title, and the parts that are not empty."""
    return "\n\n".join([f"# {title}", *filter(None, parts)])


def link(target: Path, folder: Path, name: str) -> str:
    """Return the address of a file of the repository, in the page ``name`` of a folder."""
    return Path(os.path.relpath(target, (folder / name).parent)).as_posix()


def link_between(name: str, other: str) -> str:
    """Return the address of one page in another; empty for the page itself."""
    return "" if name == other else Path(os.path.relpath(f"{other}.md", Path(name).parent)).as_posix()


@functools.cache
def document(name: str) -> Path:
    """Return a page of docs by the end of its path, wherever it is."""
    return min((ROOT / "docs").rglob(name), key=lambda path: len(path.parts))


@functools.cache
def sources() -> Mapping[Path, str]:
    """Return the sources of all packages, by their files, in order."""
    return {file: file.read_text(encoding="utf-8") for file in sorted(SOURCES.glob("*/src/**/*.py"))}


def module_of(file: Path) -> str:
    """Return the name of the module of a source file."""
    parts = file.relative_to(SOURCES).with_suffix("").parts[2:]
    return ".".join(part for part in parts if part != "__init__")
