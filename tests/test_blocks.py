"""Every code block of a page runs or is checked, or has a reason: ``python tests/test_blocks.py`` prints them."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any, NamedTuple

import pytest
import test_pages
import torch
import yaml
from pages import ROOT, Block, blocks
from torch.utils.data import DataLoader

import hocket
from hocket.plugins import KINDS, registry
from hocket_cli.keys import keys

#: The tests that run the blocks of pages, besides those of `test_pages`. A pattern may be of a page that has none.
RUN_BY = {
    "tests/test_cards.py": "docs/algorithms/*",
    "tests/test_configuration_page.py": "docs/how-to/configuration-files docs/reference/configuration",
    "tests/test_own_steps.py": "docs/how-to/gan docs/how-to/manual-optimization docs/how-to/momentum-encoder "
    "docs/how-to/recurrent docs/how-to/several-optimizers",
    "tests/test_porting.py": "docs/how-to/port*",
    "tests/test_third_party.py": "docs/how-to/plugins docs/how-to/write-a* docs/how-to/test-a-plugin "
    "docs/how-to/save-plugin-state docs/reference/algorithm-helpers",
    "tests/test_publishing_a_plugin.py": "docs/tutorials/publishing-a-plugin",
    "tests/test_mistakes.py": "docs/reference/errors",
    "packages/migration/tests/test_pages_migration.py": "docs/how-to/migrating docs/how-to/from-transformers",
    "packages/migration/tests/test_accelerate.py": "docs/how-to/from-accelerate",
    "packages/migration/tests/lightning/test_lightning_page.py": "docs/how-to/from-lightning",
}
#: Pages whose programs are parts that leave out the rest: ``Trainer(..., strategy="fsdp")``. The arguments are checked here.
FRAGMENTS = (
    "docs/explanation/resuming", "docs/reference/strategies", "docs/reference/devices",
    "docs/reference/stability",
)  # fmt: skip
DATA = ("toml", "yaml")
SHELL = ("sh", "bash", "console")
ENOUGH = 0.95
LINES_OF_A_GUIDE = 60
LONGER = ("index", "from-*", "port-from-*", "migrating")  # programs before and after, and tables of what becomes what


class Shown(NamedTuple):
    """A code block, and what runs it: a test, or nothing, with the reason."""

    page: str
    block: Block
    test: str
    reason: str


def shown() -> Iterator[Shown]:
    """Yield the blocks of code of all pages. What is text is the output of others."""
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        page = path.relative_to(ROOT).with_suffix("").as_posix()
        if not page.startswith("docs/reference/generated/"):
            yield from (Shown(page, each, *status(page, each)) for each in blocks(path) if each.language != "text")


def status(page: str, block: Block) -> tuple[str, str]:
    """Return the test that runs a block, or the reason why none does."""
    if block.language in DATA and "file" not in block.words:
        return __name__, ""  # read below
    if block.language in SHELL and not re.search(r"^\$ (hocket|python) ", block.text, re.MULTILINE):
        test = "tests/test_publishing_a_plugin.py"
        return (test, "") if page in RUN_BY[test] else ("", "commands for a shell, with other programs")
    if "from hocket_strategies.ray import launch" in block.text and page in FRAGMENTS:
        return "", "starts processes of Ray: `nox -s ray` runs others"
    if f"{page}.md" in by_pages():
        return "tests/test_pages.py", ""
    if page in FRAGMENTS:
        return __name__, ""
    tests = (test for test, patterns in RUN_BY.items() if any(fnmatch(page, each) for each in patterns.split()))
    return next(tests, ""), "no test runs this page"


def by_pages() -> set[str]:
    """The pages of `test_pages`, several of which may be one parameter."""
    values = (each if isinstance(each, str) else each.values[0] for each in test_pages.PAGES)
    return {page for value in values for page in value.split()}


def report() -> str:
    """Return how many blocks run, and a line for each that does not."""
    every = [*shown()]
    missing = [f"  {each.page}.md:{each.block.line}: {each.reason}" for each in every if not each.test]
    return "\n".join([f"{len(every) - len(missing)} of {len(every)} code blocks run or are checked", *missing])


def test_nearly_every_block_runs() -> None:
    every = [*shown()]
    assert sum(bool(each.test) for each in every) >= ENOUGH * len(every), report()


def test_the_tests_name_the_pages_that_they_run() -> None:
    """At least by the folder."""
    for test in RUN_BY:
        text = (ROOT / test).read_text(encoding="utf-8")
        for page in {each.page for each in shown() if each.test == test}:
            *_, folder, name = page.split("/")
            assert name in text or folder in text, (test, page)


@pytest.mark.parametrize("language", DATA)
def test_parts_of_files_are_right(language: str) -> None:
    """TOML is read, and a group of plug-ins is one of ours; YAML is read, and its keys are those of a configuration."""
    for each in shown():
        if each.block.language != language or each.test != __name__:
            continue
        where = f"{each.page}:{each.block.line}"
        if language == "yaml":
            unknown = set(yaml.safe_load(each.block.text)) - {*keys(), "batch_size"}
            assert all(key.startswith("x-") for key in unknown), (where, unknown)
            continue
        for group in tomllib.loads(each.block.text).get("project", {}).get("entry-points", {}):
            version, _, kind = group.removeprefix("hocket.").partition(".")
            if version == registry.API:
                assert kind in (*KINDS, "defaults"), where


@pytest.mark.parametrize("page", [each for each in FRAGMENTS if (ROOT / f"{each}.md").exists()])
def test_fragments_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they define and import is there, and the Trainer has the arguments that they pass."""
    signature = inspect.signature(hocket.Trainer)

    def build(rest: object, **arguments: Any) -> None:
        assert rest is ... and signature.bind_partial(**arguments)

    monkeypatch.setattr(hocket, "Trainer", build)
    names: dict[str, Any] = {"hocket": hocket, "Trainer": build, "DataLoader": DataLoader, "dataset": torch.arange(64)}
    programs = [each for each in shown() if (each.page, each.test, each.block.language) == (page, __name__, "python")]
    for each in programs:
        exec(compile("\n" * (each.block.line - 1) + each.block.text, f"{page}.md", "exec"), names)
    assert programs


def test_a_guide_is_short() -> None:
    """Tables that people scan belong to the reference, and a second goal to a second guide."""
    guides = {each.stem: each.read_text(encoding="utf-8").count("\n") for each in ROOT.glob("docs/how-to/*.md")}
    assert len(guides) > 60
    long = {name for name, lines in guides.items() if lines > LINES_OF_A_GUIDE}
    assert not {name for name in long if not any(fnmatch(name, each) for each in LONGER)}


if __name__ == "__main__":
    print(report())
