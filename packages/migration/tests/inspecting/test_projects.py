"""Five projects of different kinds: each line that uses a framework has the verdicts that its comment says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hocket_migration.inspecting.project import inspect

PROJECTS = Path(__file__).parent / "projects"
#: The words of the comments, ``#: maps none``.
_WORDS = {"maps": "maps", "changes": "changes", "none": "no counterpart", "unread": "not readable"}


def _expected(project: Path) -> dict[tuple[str, int], set[str]]:
    found = {}
    for path in project.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if comment := re.search(r"#: ([a-z ]+)$", line):
                found[path.relative_to(project).as_posix(), number] = {_WORDS[word] for word in comment[1].split()}
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in PROJECTS.iterdir()))
def test_each_line_has_the_verdicts_that_it_says(name):
    before = set(sys.modules)
    inspection = inspect(PROJECTS / name)
    assert not inspection.problems
    found: dict[tuple[str, int], set[str]] = {}
    for each in inspection.findings:
        found.setdefault((each.file, each.line), set()).add(each.verdict)
        assert each.text and each.name
    assert found == _expected(PROJECTS / name)
    # Nothing of the project was imported, and no framework.
    imported = {module.partition(".")[0] for module in set(sys.modules) - before}
    assert not imported & {
        "canary",
        "lightning",
        "pytorch_lightning",
        "composer",
        "transformers",
        "accelerate",
        "torch",
    }
