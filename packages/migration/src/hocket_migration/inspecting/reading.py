"""Read the Python files and notebooks of a project as text, and parse them; nothing is imported or executed."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hocket.basics import safe_files
from hocket.errors import WrongType

#: Folders that are not part of a project.
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A file, or a cell of a notebook, that cannot be read, and why."""

    file: str
    text: str
    line: int = 0
    cell: int | None = None


@dataclasses.dataclass
class SourceFile:
    """A parsed file.

    Args:
        path: where it is.
        name: its name in reports, relative to the given path.
        module: its dotted name as a module of the project.
        lines: its text, of a notebook that of all code cells.
        tree: its syntax tree.
        cells: of a notebook, the number of the first line of each code cell by the number of the cell.
        notebook: of a notebook, its content.
        encoding: of the text.
    """

    path: Path
    name: str
    module: str
    lines: list[str]
    tree: ast.Module
    cells: dict[int, int] = dataclasses.field(default_factory=dict)
    notebook: dict[str, Any] | None = None
    encoding: str = "utf-8"

    def place(self, line: int) -> tuple[int, int | None]:
        """Return the line in its cell, and the number of the cell; of a Python file the line, and None."""
        cell = max((number for number, first in self.cells.items() if first <= line), default=None)
        return (line, None) if cell is None else (line - self.cells[cell] + 1, cell)


def read(path: str | Path) -> tuple[list[SourceFile], list[Problem]]:
    """Return the Python files and notebooks at ``path``, a file or a folder, and those that cannot be read."""
    given = Path(path)
    if not given.exists():
        return [], [Problem(str(path), "there is no such file or folder")]
    paths = sorted(_walk(given)) if given.is_dir() else [given]
    root = given if given.is_dir() else given.parent
    found: list[SourceFile] = []
    problems: list[Problem] = []
    for each in paths:
        name = each.relative_to(root).as_posix()
        if given.is_dir() and each.is_symlink():
            if not each.exists() or not each.resolve().is_relative_to(root.resolve()):
                problems.append(Problem(name, "this is a link to a file that is not in the folder"))
            continue  # a file in the folder is read where it is
        read_one = _read(each, name, problems)
        (problems if isinstance(read_one, Problem) else found).append(read_one)  # type: ignore[arg-type]
    if not paths:
        problems.append(Problem(str(path), "there are no Python files or notebooks in this folder"))
    return found, problems


def omitted(path: Path) -> bool:
    """Whether something in a folder is not part of a project: caches, hidden folders, virtual environments, pipes."""
    if path.is_symlink() or path.is_file():
        return path.suffix == ".pyc"
    return not path.is_dir() or path.name in _SKIPPED or path.name[0] == "." or (path / "pyvenv.cfg").exists()


def lines_of(text: str) -> list[str]:
    """Return the lines with their ends, as syntax trees count them: form feeds and the like do not end a line."""
    return io.StringIO(text, newline="").readlines()


def _walk(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not omitted(Path(where) / each)]
        yield from (Path(where) / name for name in names if name.endswith((".py", ".ipynb")))


def _read(path: Path, name: str, of_cells: list[Problem]) -> SourceFile | Problem:
    """Return the file, or why it cannot be read; cells of a notebook that cannot be read are added to ``of_cells``."""
    cells: dict[int, int] = {}
    notebook = None
    encoding = "utf-8"
    try:
        raw = safe_files.content(path)
        if path.suffix == ".ipynb":
            notebook = safe_files.parsed(raw.decode("utf-8"))
            text, cells = _code_of(notebook)
        else:
            encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
            text = raw.decode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in the project's strings
            if notebook is None:
                tree = ast.parse(text)
            else:
                tree, bad = _parse_cells(text, cells)
                of_cells += [Problem(name, _syntax(error), error.lineno or 0, cell) for cell, error in bad]
    except (UnicodeDecodeError, LookupError) as error:
        return Problem(name, f"the text cannot be decoded: {error}. Save it as UTF-8")
    except SyntaxError as error:
        return Problem(name, f"{_syntax(error)}", error.lineno or 0)
    except (json.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
        return Problem(name, f"this is not a notebook: {error}")
    except safe_files.UnsafeFileError as error:
        return Problem(name, str(error.strerror))
    except OSError as error:
        return Problem(name, f"the file cannot be read: {error.strerror}")
    except (ValueError, RecursionError, MemoryError) as error:
        return Problem(name, f"the file cannot be parsed: {type(error).__name__}: {error}")
    parts = list(Path(name).with_suffix("").parts)
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return SourceFile(path, name, module, lines_of(text), tree, cells, notebook, encoding)


def _syntax(error: SyntaxError) -> str:
    if "encoding" in error.msg:
        return f"the text cannot be decoded: {error.msg}. Save it as UTF-8"
    text = error.text.strip() if error.text else ""
    if error.msg.startswith("Missing parentheses in call to 'print'") or ("except" in text and "," in text):
        return f"this is Python 2: {error.msg}. Port it to Python 3 first"
    return f"the syntax is not that of Python 3: {error.msg}"


def _code_of(notebook: Any) -> tuple[str, dict[int, int]]:
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        version = notebook.get("nbformat", 4) if isinstance(notebook, dict) else 4
        if isinstance(version, int) and version < 4:
            raise WrongType(f"it has format {version}. Write it anew with `jupyter nbconvert --to notebook`")
        raise WrongType("it has no list of cells")
    lines: list[str] = []
    cells: dict[int, int] = {}
    for number, cell in enumerate(notebook["cells"], 1):
        source = cell.get("source") if isinstance(cell, dict) else None
        if not isinstance(source, str | list):
            raise WrongType(f"cell {number} has no source")
        if cell.get("cell_type") != "code":
            continue
        cells[number] = len(lines) + 1
        text = source if isinstance(source, str) else "".join(source)
        lines += [line if line.endswith("\n") else f"{line}\n" for line in lines_of(text)]
    return "".join(lines), cells


def _parse_cells(text: str, cells: dict[int, int]) -> tuple[ast.Module, list[tuple[int, SyntaxError]]]:
    """Return the syntax tree of all cells that can be parsed, and the errors of the others by the number of the cell."""
    lines = lines_of(text)
    bounds = [*(first - 1 for first in cells.values()), len(lines)]
    code: list[str] = []
    bad = []
    for number, first, end in zip(cells, bounds[:-1], bounds[1:], strict=True):
        cell = _without_magics("".join(lines[first:end]))
        try:
            ast.parse(cell)
        except SyntaxError as error:
            bad.append((number, error))
            cell = "\n" * (end - first)
        code.append(cell)
    return ast.parse("".join(code)), bad


#: Lines of IPython that are not Python: ``%magic``, ``!command``, ``?name``, ``name?``, ``x = !command``.
_IPYTHON = re.compile(r"[%!?]|[\w.]+\?{1,2}\s*$|[\w.]+\s*=\s*[%!]")


def _without_magics(text: str) -> str:
    """Replace the lines of a cell that are not Python: magics, shell commands, and cells of another language."""
    lines = []
    magic = text.lstrip().partition("\n")[0].split()
    if magic and magic[0].startswith("%%") and magic[0] not in ("%%time", "%%timeit", "%%capture", "%%prun"):
        return "\n" * len(lines_of(text))
    for line in lines_of(text):
        stripped = line.lstrip()
        indent = line[: len(line) - len(stripped)]
        lines.append(f"{indent}pass\n" if _IPYTHON.match(stripped) else line)
    return "".join(lines)
