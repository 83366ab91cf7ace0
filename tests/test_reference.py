"""The pages of the reference are written from the packages: each public name once, and no dead link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(Path(__file__).parent / "golden"))

import surface  # noqa: E402

Pages = dict[str, str]


def written(folder: Path, seed: str) -> Pages:
    """The pages that a process writes, which iterates over sets in an order of its own."""
    command = [sys.executable, str(ROOT / "docs/_generate"), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md"))
    }


pytestmark = pytest.mark.long  # the session docs generates these pages too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs") / "reference"


@pytest.fixture(scope="module")
def pages(folder: Path) -> Pages:
    pytest.importorskip("sklearn")
    return written(folder, "1")


def documented(pages: Pages) -> list[str]:
    """The names whose docstrings the pages render, or that they say are others."""
    found = []
    for text in pages.values():
        for path, members in re.findall(
            r"^\.\. (?:auto\w+|py:data):: ([\w.]+)\n(?:   :members:(.*))?", text, re.MULTILINE
        ):
            found += [path, *(f"{path}.{member.strip()}" for member in members.split(",") if member.strip())]
        found += re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    return found


def missing_or_twice(pages: Pages) -> list[str]:
    found = documented(pages)
    return [
        name
        for line in surface.names()
        if found.count(name := re.split(r"[( ]", line)[0]) + (name in _linked(pages)) != 1
    ]


def _linked(pages: Pages) -> set[str]:
    """The modules that the page of another one links."""
    return {each for text in pages.values() for each in re.findall(r"^\| \[`(hocket[\w.]*)`\]", text, re.MULTILINE)}


def test_each_public_name_is_documented_once(pages: Pages) -> None:
    assert missing_or_twice(pages) == []


def test_a_name_that_is_missing_or_twice_is_noticed(pages: Pages) -> None:
    changed = dict(pages)
    changed["api/hocket/Time.md"] = ""
    changed["again.md"] = "```{eval-rst}\n.. autofunction:: hocket.plugins.names\n```"
    assert {"hocket.Time", "hocket.plugins.names"} <= set(missing_or_twice(changed))


def test_it_writes_the_same_in_another_process(folder: Path, pages: Pages, tmp_path: Path) -> None:
    assert written(folder.parent / "again", "2") == pages


def dead_links(folder: Path, pages: Pages) -> list[str]:
    dead = []
    for name, text in pages.items():
        for target, _, anchor in (
            each.partition("#") for each in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
        ):
            path = (folder / name).parent / target if target else folder / name
            if not path.exists() or (anchor and anchor not in _anchors(path)):
                dead.append(f"{name}: {target}#{anchor}")
        names = set(documented(pages))
        owners = re.findall(r"\{py:\w+\}`~?([\w.]+)`", text)
        dead += [f"{name}: {each}" for each in owners if not {each, each.rpartition(".")[0]} & names]
    return dead


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere(folder: Path, pages: Pages) -> None:
    assert dead_links(folder, pages) == []


def test_a_dead_link_is_noticed(folder: Path, pages: Pages) -> None:
    text = "[one](absent.md), [two](index.md#absent), {py:obj}`hocket.Absent`"
    assert len(dead_links(folder, {**pages, "page.md": text})) == 3


def test_each_page_opens_with_what_it_is_for(pages: Pages) -> None:
    wrong = [name for name, text in pages.items() if not text.split("\n\n")[1].startswith("Look up here ")]
    assert wrong == []


def test_each_page_can_be_reached_from_the_index(pages: Pages) -> None:
    found, new = set(), {"index.md"}
    while new:
        found |= new
        targets = {
            (Path(name).parent / link).as_posix()
            for name in new
            for link in re.findall(r"\]\(((?!\.\.)[\w/.-]+\.md)\)", pages.get(name, ""))
        }
        new = {each for each in targets if each in pages} - found
    assert set(pages) - found == set()


def test_everything_with_a_name_has_its_place(pages: Pages) -> None:
    """The other sections of the public interface: hooks, plug-ins, keys, variables, commands and exit codes."""
    for line in surface.kinds():
        if line.startswith("plug-in commands "):
            assert f"commands/{line.split()[-1]}.md" in pages
        elif line.startswith("plug-in"):
            assert f"plugins/{'/'.join(line.split()[1:])}.md" in pages
    for line in surface.commands():
        if found := re.fullmatch(r"command hocket (\w+).*? (--[\w-]+).*", line):
            assert found[2] in pages[f"commands/{found[1]}.md"], line
    for line in surface.variables():
        assert re.search(rf"^\| `{line.split()[-1]}` \| \S", pages["environment-variables.md"], re.MULTILINE), line
    for code in surface.ExitCode:
        assert re.search(rf"^\| {code.value} \| `{code.name}` \| \S+ \S", pages["exit-codes.md"], re.MULTILINE), code
    for name in iter(surface.keys.keys()):
        assert f"\n## {name}\n" in pages["configuration-keys.md"]
    for spec in surface.SPECS:
        for hook in vars(spec):
            assert hook[0] == "_" or f"{spec.__name__}.{hook}`" in pages["hooks.md"]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("errors/core.md", "has no unit"),
        ("errors/cli.md", "is a file and not a command"),
        ("errors/checkpoints.md", "has no weights itself"),
        ("errors/explained.md", "drop\\_last=True"),
    ],
)
def test_an_error_is_found_by_its_text(pages: Pages, page: str, text: str) -> None:
    assert text in pages[page]
