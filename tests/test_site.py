"""The check of the built site notices what it is for; `nox -s docs` builds the site and runs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def check_site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_site", ROOT / ".ci/check_site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two pages that are right."""
    (tmp_path / "guides").mkdir()
    (tmp_path / "style.css").touch()
    (tmp_path / "index.html").write_text(
        '<link href="style.css"><a href="guides/">guides</a><a href="guides/index.html?q=1#one">one</a>'
        '<a href="https://example.org">elsewhere</a><img src="data:image/png;base64,AAAA">'
    )
    (tmp_path / "guides/index.html").write_text(
        '<h1 id="one">One</h1><a href="#one">one</a><a href="/index.html">all</a>'
    )
    return tmp_path


def test_a_site_that_is_right_has_no_problems(check_site: ModuleType, site: Path) -> None:
    assert [*check_site.problems(site)] == []


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ('<a href="../absent.html">', "leads to no file"),
        ('<img src="absent.png">', "leads to no file"),
        ('<meta http-equiv="refresh" content="0; url=absent.html">', "leads to no file"),
        ('<a href="../index.html#absent">', "leads to no anchor"),
        ('<a href="#absent">', "leads to no anchor"),
        ('<script src="https://example.org/a.js"></script>', "is requested from elsewhere"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "is requested from elsewhere"),
    ],
)
def test_a_problem_is_noticed(check_site: ModuleType, site: Path, written: str, problem: str) -> None:
    (site / "guides/page.html").write_text(written)
    (found,) = check_site.problems(site)
    assert found.startswith("guides/page.html: ") and found.endswith(problem)
