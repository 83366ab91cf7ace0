"""Every algorithm here has the layout of docs/reference/algorithm-helpers.md: one module holds its function and its class."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"
CORE = PACKAGES / "core/src/hocket"
FOLDERS = sorted(path.parent for path in PACKAGES.glob("algorithms-*/pyproject.toml"))


def declared(folder: Path) -> dict[str, str]:
    """The algorithms' entry points."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project["entry-points"]["hocket.v1.algorithms"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_algorithm_has_a_module_of_its_name_with_a_function_and_the_class(folder: Path) -> None:
    algorithms = declared(folder)
    assert algorithms
    for name, target in algorithms.items():
        module, _, cls = target.partition(":")
        assert module.rpartition(".")[2] == name.replace("-", "_")
        source = ast.parse((folder / "src" / f"{module.replace('.', '/')}.py").read_text())
        defined = {node.name for node in source.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        imported = {a.name for node in source.body if isinstance(node, ast.ImportFrom) for a in node.names}
        assert cls in defined
        functional = importlib.import_module(f"{module.partition('.')[0]}.functional")
        assert set(functional.__all__) & (defined | imported), f"{name} has no function in {functional.__name__}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_functional_only_re_exports(folder: Path) -> None:
    (path,) = folder.glob("src/*/functional.py")
    imported = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.name for alias in node.names} - {"annotations"}
        else:  # the docstring and __all__
            assert isinstance(node, ast.Expr) or ast.unparse(node).startswith("__all__ ="), ast.unparse(node)
    module = importlib.import_module(f"{path.parent.name}.functional")
    assert imported == set(module.__all__)


def test_core_asks_insight_for_functions_that_exist() -> None:
    """They are named by texts, since core imports no other package."""
    asked = {name for file in CORE.rglob("*.py") for name in re.findall(r"""\bask\(\s*"([\w.]+)\"""", file.read_text())}
    assert len(asked) > 10
    for name in asked:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(f"hocket_insight.{module}"), function)), name
