"""How large each package may be, in lines of code; who makes one smaller lowers its budget."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"
#: Lines of code of each package's sources.
BUDGETS = {
    "algorithms-general": 3610,
    "algorithms-nlp": 3480,
    "algorithms-vision": 2420,
    "checkpoints": 5130,
    "cli": 4790,
    "core": 15995,
    "data": 500,
    "insight": 4870,
    "loggers": 1430,
    "migration": 10140,
    "report": 1070,
    "strategies": 4560,
    "testkit": 3330,
}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def lines_of_code(file: Path) -> int:
    """The number of lines of a file that are not blank, a comment or part of a docstring."""
    statements = [each for each in ast.walk(ast.parse(file.read_bytes())) if isinstance(each, ast.Expr)]
    texts = [each for each in statements if isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)]
    documentation = {line for each in texts for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    code: set[int] = set()
    with file.open("rb") as opened:
        for token in tokenize.tokenize(opened.readline):
            if token.type not in _NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def size(package: str) -> int:
    return sum(map(lines_of_code, (PACKAGES / package / "src").rglob("*.py")))


def test_every_package_has_a_budget() -> None:
    assert {each.parent.name for each in PACKAGES.glob("*/pyproject.toml")} == BUDGETS.keys()


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_stays_within_its_budget_and_the_budget_follows(package: str) -> None:
    lines, budget = size(package), BUDGETS[package]
    assert lines <= budget, f"{package} has {lines} lines of code; the budget is {budget}"
    assert lines > 0.97 * budget, f"{package} has {lines} lines of code; lower its budget from {budget}"


def test_what_is_a_line_of_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""One\n\ntwo."""\n\n# comment\nx = """a\nb"""\n\n\ndef f():\n    """Return."""\n    return (\n        1\n    )\n'
    )
    assert lines_of_code(tmp_path / "a.py") == 6
