"""How large each package and each module of core may be, and how strict the types of core are; budgets follow what is there."""

from __future__ import annotations

import ast
import tokenize
import tomllib
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"
#: Lines of code of each package's sources.
BUDGETS = {
    "algorithms-general": 3704,
    "algorithms-nlp": 3554,
    "algorithms-vision": 2425,
    "checkpoints": 5437,
    "cli": 5769,
    "core": 15591,
    "data": 496,
    "insight": 5315,
    "loggers": 1450,
    "migration": 10170,
    "report": 1070,
    "strategies": 4600,
    "streaming": 5110,
    "testkit": 4090,
    "tools": 6714,
}
#: Most lines of a file of core, and the files that may have more: a step's actions, the fit loop, the Trainer's documentation.
LINES, LONGER = 400, {"loop/actions.py", "loop/fit.py", "run/trainer.py"}
#: Most parameters of core's functions that are annotated as Any alone.
ANY = 124
CORE = PACKAGES / "core/src/hocket"
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


def test_modules_of_core_are_short() -> None:
    long = {str(file.relative_to(CORE)) for file in CORE.rglob("*.py") if file.read_bytes().count(b"\n") > LINES}
    assert long == LONGER, (
        f"divide modules of more than {LINES} lines by subject; take those that are shorter now off the list"
    )
    assert len(LONGER) <= 3


def anys(source: bytes) -> int:
    """The number of parameters of functions whose annotation is ``Any``."""
    parameters = [node.annotation for node in ast.walk(ast.parse(source)) if isinstance(node, ast.arg)]
    return sum(isinstance(kind, ast.Name) and kind.id == "Any" for kind in parameters)


def test_few_parameters_of_core_are_any() -> None:
    assert anys(b"def f(a: Any, *b: Any, c: list[Any], d: int, **e: Any) -> Any: lambda x: x") == 3
    count = sum(anys(file.read_bytes()) for file in CORE.rglob("*.py"))
    assert count <= ANY, f"{count} parameters of core are Any, of {ANY}; annotate what a function reads of them"


def test_types_of_core_are_strict() -> None:
    settings = tomllib.loads((PACKAGES.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    relaxed = [module for part in settings["overrides"] for module in part["module"]]
    assert settings["strict"] is True
    assert not [module for module in relaxed if module.partition(".")[0] in ("hocket", "*")]


def test_what_is_a_line_of_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""One\n\ntwo."""\n\n# comment\nx = """a\nb"""\n\n\ndef f():\n    """Return."""\n    return (\n        1\n    )\n'
    )
    assert lines_of_code(tmp_path / "a.py") == 6
