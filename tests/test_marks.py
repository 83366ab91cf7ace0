"""Marks around settings, as `hocket.errors` describes them, are only in texts that lose them before they are shown."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parent.parent / "packages").glob("*/src/**/*.py"))
#: Functions that give their text to `warn` or to a Mistake, besides those that return it.
PASS_ON = {"warn", "_warn", "self._warn_once", "check_mode", "problems.append", "Check", "_given"}
#: Calls that read marks.
READ = {"re.compile", "mark[1].partition", "text.removeprefix('«').partition", "instead.removeprefix('«').partition"}


@cache
def mistakes() -> set[str]:
    """The names of all subclasses of Mistake."""
    classes = [
        node for file in SOURCES for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)
    ]
    known, before = {"Mistake"}, 0
    while len(known) > before:
        before = len(known)
        known |= {kind.name for kind in classes if any(ast.unparse(base) in known for base in kind.bases)}
    return known


def texts(statement: ast.AST, call: str = "") -> Iterator[tuple[ast.expr, str]]:
    """Yield the texts of a statement, without those inside other texts, and the outermost call that each is given to."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            if not isinstance(statement, ast.Expr):  # a docstring
                yield node, call
        elif isinstance(node, ast.stmt):
            yield from texts(node)
        elif not isinstance(node, ast.Compare):  # which reads a text
            yield from texts(node, call or (ast.unparse(node.func) if isinstance(node, ast.Call) else ""))


def depths(text: ast.expr, outside: int = 0) -> Iterator[int]:
    """Yield how many marks are open after each quotation mark of a text, those of texts inside it too."""
    depth = outside
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        for letter in text.value:
            depth += (letter == "«") - (letter == "»")
            if letter in "«»":
                yield depth
    elif isinstance(text, ast.JoinedStr):
        for value in text.values:
            for depth_now in depths(value, depth):
                yield depth_now
                depth = depth_now
    else:
        for inner, _ in texts(text):
            yield from depths(inner, depth)


def wrong(source: str) -> list[str]:
    """Return the lines whose marks are shown, nested or not closed."""
    lines = []
    for text, call in texts(ast.parse(source)):
        marks = ast.unparse(text)
        if not set("«»¦") & set(marks) or call in READ or (isinstance(text, ast.Constant) and len(text.value) == 1):
            continue
        opened = list(depths(text))
        if call and call not in mistakes() | PASS_ON:
            lines.append(f"{text.lineno}: the marks of a text given to {call} are shown")
        if not set(opened) <= {0, 1} or (opened and opened[-1]):
            lines.append(f"{text.lineno}: marks are nested or not closed")
    return lines


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise WrongValue(f'«a={b}» is not «None»«, or x¦».')", 0),
        ("raise ValueError('«a=1» is wrong')", 1),
        ("print(f'Write «{name}=1».')", 1),
        ("warn('«a=«b»»')", 1),
        ("""warn(f"«a={'«b=1»' if b else ''}»")""", 1),
        ("warn('«a=1')", 1),
        ("if x:\n    error.add_note('Write «a=1».')", 1),
    ],
)
def test_what_is_wrong_is_found(source: str, found: int) -> None:
    assert len(wrong(source)) == found


def test_marks_are_not_shown_nor_nested() -> None:
    assert not {str(file): lines for file in SOURCES if (lines := wrong(file.read_text()))}
