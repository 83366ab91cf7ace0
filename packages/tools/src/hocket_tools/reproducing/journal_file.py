"""The files of a journal: ``journal.jsonl`` in the folder of a run, one for each rank, and the sources that the run imported.

The first line names the run, others have an ``environment``, or are entries with digests. Both have the ``batch`` after which
they were written, and all have the number of their ``line``, so that a missing one is noticed. A fit that ends writes ``end``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.basics import safe_files
from hocket.basics.run_files import lines, strict

#: The names of the file of rank 0, and of the file with the texts of sources by their digests.
NAME, SOURCES = "journal.jsonl", "journal.sources.json"
VERSION = 1


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of the journal of a rank."""
    return folder / (f"journal.rank{rank}.jsonl" if rank else NAME)


@dataclass(slots=True)
class Recorded:
    """The journal of a rank as it was read."""

    #: The first line; empty if there is none.
    head: dict[str, Any] = field(default_factory=dict)
    #: Environments, and entries, by batch.
    environments: dict[int, dict[str, Any]] = field(default_factory=dict)
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: The numbers of lines that are none of these, and of the first one before which a line is missing.
    damaged: list[int] = field(default_factory=list)
    #: All other lines as they were read, and whether the last one says that a fit has ended.
    lines: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Return what a file holds; nothing if it cannot be read. A last line that a killed run left incomplete is skipped."""
        recorded = cls()
        for number, line in enumerate(lines(path), 1):
            if not recorded.add(line) or (line.get("line", number) != number and not recorded.damaged):
                recorded.damaged.append(number)
        return recorded

    def add(self, line: dict[str, Any]) -> bool:
        """Add a line. Return False if no journal has such a line."""
        batch, self.ended = line.get("batch"), "end" in line
        if "journal" in line:
            self.head = line
        elif type(batch) is not int:
            return False
        elif isinstance(line.get("environment"), dict):
            self.environments[batch] = line["environment"]
        elif not self.ended:
            self.entries[batch] = line
        self.lines.append(line)
        return True

    def entry(self, batch: int, since: int) -> dict[str, Any]:
        """Return the entry of a batch, with losses and orders of all batches after ``since`` that were recorded."""
        entry = dict(self.entries[batch])
        losses, order = list(entry.get("losses", ())), entry.get("order")
        while len(losses) < batch - since and (before := self.entries.get(batch - len(losses), {}).get("losses")):
            text = self.entries[batch - len(losses)].get("order")
            order = None if order is None or text is None else text + order
            losses = [*before, *losses]
        return {**entry, "losses": losses, "order": order} if losses else entry

    def environment(self, batch: int) -> dict[str, Any]:
        """Return the environment in which a batch was trained on."""
        begun = [start for start in self.environments if start < max(batch, 1)]
        return self.environments[max(begun)] if begun else {}


class JournalFile:
    """Append lines to a journal, which begins with the lines up to some batch if the file is one of the same run."""

    def __init__(self, path: Path, run: str, batch: int, **head: Any) -> None:
        before = Recorded.read(path)
        #: What the file held of this run up to the batch. Lines keep their numbers, which show what is missing among them.
        self.kept = Recorded()
        if before.head.get("run") == run:
            for line in before.lines:
                if line.get("batch", 0) <= batch and "end" not in line:
                    self.kept.add(line)
        else:
            if path.exists():
                _keep(path)
            self.kept.add({"journal": VERSION, "run": run, **head, "line": 1})
        safe_files.replace(path, "".join(map(_line, self.kept.lines)))
        self._path, self._number = path, self.kept.lines[-1].get("line", len(self.kept.lines))

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line at once."""
        self._number += 1
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line({**line, "line": self._number}))


def _line(line: Mapping[str, Any]) -> str:
    return f"{json.dumps(strict(line), allow_nan=False)}\n"


def _keep(path: Path) -> None:
    """Rename the journal of an earlier run, whose folder this run has taken over."""
    number = 1
    while (kept := path.with_name(f"{path.stem}.earlier-{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)


def add_sources(folder: Path, texts: Mapping[str, str]) -> None:
    """Add texts by digest to those of the run."""
    known = read_sources(folder)
    if not texts.keys() <= known.keys():
        safe_files.replace(folder / SOURCES, json.dumps({**known, **texts}, indent=0))


def read_sources(folder: Path) -> dict[str, str]:
    """Return the texts of sources by digest; empty if there are none."""
    try:
        found = safe_files.parsed(safe_files.content(folder / SOURCES, most=1 << 26))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
