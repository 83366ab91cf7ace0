"""The pages about `hocket migrate` and transformers in docs/how-to and docs/reference run, in the order of their programs."""

from __future__ import annotations

import re
import warnings

import pytest
from pages import ROOT, blocks, write

GUIDE = ROOT / "docs/how-to/migrating.md"


@pytest.mark.parametrize(
    "pages", ["how-to/migrating reference/migrate", "how-to/from-transformers", "how-to/transformers-arguments"]
)
def test_page_runs(pages, tmp_path, monkeypatch, capsys):
    if "transformers" in pages:
        pytest.importorskip("transformers")
        pytest.importorskip("hocket_general")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    (tmp_path / "project").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in (block for page in pages.split() for block in blocks(ROOT / f"docs/{page}.md")):
            if "file" in block.words:
                write(block, tmp_path)
            else:
                exec(compile(block.text, pages, "exec"), names)
    assert len(names) > 2


def test_the_output_that_the_page_shows_is_that_of_the_command(tmp_path, monkeypatch, capsys):
    from hocket_migration.inspecting import project, report

    (program,) = blocks(GUIDE)
    (tmp_path / "project").mkdir()
    write(program, tmp_path)
    monkeypatch.chdir(tmp_path)
    printed = report.of_inspection(project.inspect("project")).splitlines()
    text = GUIDE.read_text(encoding="utf-8")
    shown = re.search(r"\$ hocket migrate inspect project\n(.*?)```", text, re.DOTALL)[1].splitlines()
    assert [line for line in shown if line != "…"] == [line for line in printed if line in shown]
    assert len(shown) > 6
