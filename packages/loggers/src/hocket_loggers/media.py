"""Images, tables, texts and histograms of a run, as files of bounded size in its folder ``media``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.basics import safe_files
from hocket.basics.run_files import MEDIA, inside, objects, parsed, strict
from hocket_loggers.png import png
from hocket_loggers.resumable_lines import LinesFile

_MOST_IMAGES, _MOST_ROWS, _MOST_CHARACTERS, _MOST_IN_A_CELL = 16, 100, 20_000, 500
_MOST_BYTES = 100_000_000


class Media:
    """Write ``media/metrics.jsonl``, beside the file ``metrics.jsonl`` that the methods are given, and the images it names.

    The names of images follow from the position of their line in that file, so that a resumed run writes the same ones.
    """

    def __init__(self) -> None:
        self._lines = LinesFile(header=True)
        #: Bytes of all images in the file; None until it was read.
        self._bytes: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file and its checksum."""
        return self._lines.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore length and checksum, for :meth:`truncate`."""
        self._lines.load_state_dict(state_dict)
        self._bytes = None

    def truncate(self, path: Path, run: str) -> None:
        """Remove what was written after the checkpoint."""
        index = _index(path)
        for line in map(parsed, self._lines.truncate(index, run).splitlines()):
            for name in line.get("files", ()):
                if (file := inside(index.parent, name)) is not None:
                    file.unlink(missing_ok=True)
        if index.exists() and not index.stat().st_size:
            index.unlink()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def write(self, path: Path, run: str, line: Mapping[str, Any]) -> None:
        """Write a line."""
        if not self._lines.is_open:
            self._lines.open(_index(path), run)
        self._lines.write(strict(line))

    def images(self, path: Path, run: str, line: dict[str, Any], images: Sequence[Any]) -> None:
        """Write images, and a line with their names."""
        index = _index(path)
        folder = index.parent / f"{index.stem}-{run[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._bytes is None:
            self._bytes = _bytes(index)
        # Unusual names may have no letters left, and two of them the same; they differ in their digests.
        digest = hashlib.sha256(next(iter(line.values())).encode()).hexdigest()[:6]
        words = re.sub(r"[^A-Za-z0-9]+", "-", next(iter(line.values())))[:40].strip("-")
        files, written = [], 0
        for number, image in enumerate(images[:_MOST_IMAGES]):
            data = png(image)
            if self._bytes + written + len(data) > _MOST_BYTES:
                break
            file = folder / f"{words}-{digest}-ba{line['batch']}-at{self._lines.size}-{number}.png"
            with safe_files.replacing(file) as written_to:
                written_to.write(data)
            files.append(file.relative_to(index.parent).as_posix())
            written += len(data)
        self._bytes += written
        self.write(path, run, {**line, "files": files, "bytes": written, **_omitted(len(images), len(files))})

    def table(
        self, path: Path, run: str, line: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Write a line with the first rows of a table."""
        shown = [[_cell(cell) for cell in row] for row in rows[:_MOST_ROWS]]
        content = {"columns": [_cell(each) for each in columns], "rows": shown, **_omitted(len(rows), len(shown))}
        self.write(path, run, line | content)

    def text(self, path: Path, run: str, line: dict[str, Any], text: str) -> None:
        """Write a line with the beginning of a text."""
        shown = text[:_MOST_CHARACTERS]
        self.write(path, run, {**line, "content": shown, **_omitted(len(text), len(shown))})


def _index(path: Path) -> Path:
    return path.parent / MEDIA / path.name


def _bytes(index: Path) -> int:
    if not index.exists():
        return 0
    return sum(int(line.get("bytes", 0)) for line in objects(index))


def _omitted(there: int, written: int) -> dict[str, int]:
    return {"omitted": there - written} if there > written else {}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= _MOST_IN_A_CELL else f"{text[:_MOST_IN_A_CELL]}…"
