"""The code blocks of Markdown pages: tests run those of README.md and of docs/ as a reader would, from an empty folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)[ \t]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, the ``key=value`` words after it, its text, and its first line in the page."""

    language: str
    words: dict[str, str]
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            match[1],
            dict(word.partition("=")[::2] for word in match[2].split()),
            match[3],
            text.count("\n", 0, match.start()) + 2,
        )
        for match in _BLOCK.finditer(text)
    ]


def write(block: Block, folder: Path) -> None:
    """Write a block that is a file, ``file=NAME``, into a folder."""
    (folder / block.words["file"]).write_text(block.text, encoding="utf-8")


def sides(block: Block) -> tuple[str, str]:
    """Return what a block of differences removes and adds, with the lines that both have."""
    lines = block.text.splitlines(keepends=True)
    old, new = ("".join(line[1:] or line for line in lines if line[0] in kept) for kept in (" -\n", " +\n"))
    return old, new


def apply(block: Block, folder: Path) -> None:
    """Change a file by a block of differences, ``diff file=NAME``, whose lines begin with a space, a minus or a plus."""
    file, (old, new) = folder / block.words["file"], sides(block)
    before = file.read_text(encoding="utf-8")
    assert before.count(old) == 1, f"line {block.line}: {old!r} is not once in\n{before}"
    file.write_text(before.replace(old, new), encoding="utf-8")
