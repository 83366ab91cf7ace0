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


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks that are files, ``file=NAME``, into a folder."""
    for block in blocks(page):
        if name := block.words.get("file"):
            (folder / name).write_text(block.text, encoding="utf-8")
