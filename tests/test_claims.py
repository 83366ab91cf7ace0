"""The pages that compare hocket with others: each claim names a test that exists."""

from __future__ import annotations

import re

import pytest
from pages import ROOT

PAGES = [ROOT / "docs/explanation" / name for name in ("features.md", "problems-elsewhere.md", "exactness.md")]
_TEST = re.compile(r"\[(test_\w+)\]\(([^)]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tests_that_a_page_names_exist(page):
    named = _TEST.findall(page.read_text(encoding="utf-8"))
    assert len(named) >= 10
    missing = [
        f"{file}: {name}"
        for name, file in named
        if not re.search(rf"^def {name}\(", (page.parent / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []


def test_each_tick_has_a_test_and_each_mark_of_others_that_is_partial_has_a_note():
    tables, rest = PAGES[0].read_text(encoding="utf-8").split("## Notes on the marks of others")
    notes, tests = rest.split("## The test behind each tick")
    rows = {row[0]: row[2:] for row in re.findall(r"^\| (\d+) \|" + r" ([^|]*) \|" * 8 + "$", tables, re.MULTILINE)}
    assert [int(number) for number in rows] == list(range(1, 52))
    ticked = {number for number, marks in rows.items() if marks[0] in ("✓", "◐")}
    assert ticked == {row[0] for row in re.findall(r"^\| (\d+) \|(.*)\|$", tests, re.MULTILINE) if "[test_" in row[1]}
    noted = {number for numbers in re.findall(r"^- ([\d, ]+):", notes, re.MULTILINE) for number in numbers.split(", ")}
    assert {number for number, marks in rows.items() if "◐" in marks} <= noted


def test_each_complaint_has_threads_and_tests():
    complaints = re.split(r"^## \d+\. ", PAGES[1].read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(complaints) == 12
    for complaint in complaints:
        assert "Threads: " in complaint and "https://github.com/" in complaint and "\nTests: " in complaint, complaint
