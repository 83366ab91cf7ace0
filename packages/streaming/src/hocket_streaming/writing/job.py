"""One data set that is being written: what its processes know, and its folder of work, where a restart continues."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics.safe_files import replace
from hocket.errors import WrongState
from hocket_streaming.writing import runs

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files
    from hocket_streaming.writing.sources import Source
    from hocket_streaming.writing.targets import Entry, Target


@dataclass
class Job:
    """What every process knows; it is pickled.

    Attributes:
        files: where files are written: for a local target, a folder that gets its name when it is complete.
        source, target, shuffle, seed: as `write` was asked.
        work: the folder of runs and of what is done.
        memory: bytes of samples that a process sorts at a time.
    """

    source: Source
    target: Target
    files: Files
    work: Path
    shuffle: bool
    seed: int
    memory: int

    def sort(self, part: int) -> None:
        """Read a part of the source into runs."""
        keys = runs.keys_of(part, self.shuffle, self.seed)
        samples = map(self.target.encode, self.source.read(part))
        names = runs.write_runs(samples, keys, self.work, part, self.memory)
        replace(self.work / f"part-{part:06}.json", json.dumps(names))

    def make(self, number: int) -> Entry:
        """Write a file of the data set, and return what the last file says about it."""
        samples = runs.read(self._runs, self.ranges[number])
        name, content, entry = self.target.file(number, len(self.ranges), samples)
        self.files.write(name, content)
        replace(self.work / f"file-{number:06}.json", json.dumps([name, len(content), entry]))
        return entry

    @cached_property
    def ranges(self) -> list[runs.Range]:
        """Which samples belong to which file, once all parts are read."""
        path = self.work / "ranges.json"
        if not path.exists():
            replace(path, json.dumps(runs.ranges(self._runs, self.target.filling)))
        return [runs.Range(*each) for each in _json(path)]

    @cached_property
    def _runs(self) -> list[runs.Run]:
        names = [name for part in range(self.source.parts) for name in _json(self.work / f"part-{part:06}.json")]
        return [runs.Run(self.work / name) for name in names]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_runs"}

    def done(self, kind: str, count: int) -> list[int]:
        """Return the numbers of "part" or "file" that are done."""
        there = {name for name in os.listdir(self.work) if name.startswith(kind)}
        return [number for number in range(count) if f"{kind}-{number:06}.json" in there]

    def written(self, count: int) -> list[tuple[str, int, Entry]]:
        """Return the names, bytes and entries of the files."""
        return [_json(self.work / f"file-{number:06}.json") for number in range(count)]


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


@contextmanager
def folder(path: Path, settings: Any, staging: Path) -> Iterator[None]:
    """Begin or continue the work in a folder, as the only process.

    Args:
        settings: what has to be the same when it continues.
        staging: the folder of files until they are complete.

    Raises:
        WrongState: another process writes there, or it was begun with other settings.
    """
    path.mkdir(parents=True, exist_ok=True)
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WrongState(
                f"Another process writes this data set: its work is in {path}. Wait until it ends."
            ) from None
        said = path / "settings.json"
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        if said.exists() and said.read_text() != digest:
            raise WrongState(
                f"This data set was begun with another source or other settings: {path}. Repeat the same command to "
                "continue, or remove this folder to begin again."
            )
        for temporary in [*path.glob(".*"), *staging.glob(".*")]:  # of a process that was killed
            temporary.unlink()
        replace(said, digest)
        yield
    finally:
        os.close(handle)
