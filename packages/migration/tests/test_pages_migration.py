"""The programs of docs/how-to/migrating.md and docs/how-to/from-transformers.md run, in the order of the page."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs/how-to"
_BLOCK = re.compile(r"^```python(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "needs"), [("migrating.md", None), ("from-transformers.md", "transformers")])
def test_page_runs(page, needs, tmp_path, monkeypatch, capsys):
    if needs is not None:
        pytest.importorskip(needs)
        pytest.importorskip("hocket_general")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    blocks = _BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, text in blocks:
            if name:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
            else:
                exec(compile(text, page, "exec"), names)


def test_the_output_that_the_page_shows_is_that_of_the_command(tmp_path, monkeypatch, capsys):
    from hocket_migration.inspecting import project, report

    text = (DOCS / "migrating.md").read_text(encoding="utf-8")
    name, program = next(iter(_BLOCK.findall(text)))
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(program)
    monkeypatch.chdir(tmp_path)
    printed = report.of_inspection(project.inspect("project")).splitlines()
    shown = re.search(r"\$ hocket migrate inspect project\n(.*?)```", text, re.DOTALL)[1].splitlines()
    assert [line for line in shown if line != "…"] == [line for line in printed if line in shown]
    assert len(shown) > 6
