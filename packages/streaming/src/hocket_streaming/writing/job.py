"""One data set that is being written: what its processes know, and its folder of work, where a restart continues."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics.safe_files import replace
from hocket.errors import WrongState
from hocket.help import warn
from hocket_streaming.errors import MissingData
from hocket_streaming.writing import runs

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files
    from hocket_streaming.writing.sources import Source
    from hocket_streaming.writing.targets import Entry, Target

#: Most runs that are merged at a time.
MOST = 1024


@dataclass
class Job:
    """What every process knows; it is pickled.

    Attributes:
        files: where files are written: for a local target, a folder that gets its name when it is complete.
        source, target, shuffle, seed: as `write` was asked.
        work: the folder of runs and of what is done.
        memory: bytes of samples that a process sorts at a time.
        names: of the runs that files are made of.
    """

    source: Source
    target: Target
    files: Files
    work: Path
    shuffle: bool
    seed: int
    memory: int
    names: list[str] = field(default_factory=list)

    def sort(self, part: int) -> None:
        """Read a part of the source into runs."""
        keys = runs.keys_of(part, self.shuffle, self.seed)
        samples = map(self.target.encode, self.source.read(part))
        names = runs.write_runs(samples, keys, self.work, part, self.memory)
        replace(self.work / f"part-{part:06}.json", json.dumps(names))

    def merge(self, groups: Sequence[Sequence[str]], level: int, number: int) -> None:
        """Merge a group of runs into one."""
        opened = [runs.Run(self.work / name) for name in groups[number]]
        runs.merge(opened, self.work / f"merged-{level}-{number:06}", self.memory)

    def merges(self) -> Iterator[tuple[Callable[[int], None], list[int], int]]:
        """Yield tasks until there are few runs: a task, the numbers that it is not done for, and how many there are."""
        state = self.work / "runs.json"
        if not state.exists():
            names = [name for part in range(self.source.parts) for name in _json(self.work / f"part-{part:06}.json")]
            replace(state, json.dumps([0, names]))
        level, self.names = _json(state)
        while len(self.names) > MOST:
            groups = [self.names[at : at + MOST] for at in range(0, len(self.names), MOST)]
            there, merged = set(os.listdir(self.work)), [f"merged-{level}-{number:06}" for number in range(len(groups))]
            missing = [number for number, name in enumerate(merged) if name not in there]
            yield partial(self.merge, groups, level), missing, len(groups)
            before, self.names, level = self.names, merged, level + 1
            replace(state, json.dumps([level, merged]))
            for name in before:
                (self.work / name).unlink()

    def make(self, number: int) -> Entry:
        """Write a file of the data set, and return what the last file says about it."""
        samples = runs.read(self._runs, self.ranges[number])
        name, content, entry = self.target.file(number, len(self.ranges), samples)
        self.write(name, content)
        replace(self.work / f"file-{number:06}.json", json.dumps([name, len(content), entry]))
        return entry

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the data set."""
        try:
            self.files.write(name, content)
        except MissingData as error:
            raise MissingData(
                f"{self.files.url(name)} cannot be written: the bucket does not exist. Create it, or write to another one."
            ) from error

    @cached_property
    def ranges(self) -> list[runs.Range]:
        """Which samples belong to which file, once all parts are read and merged."""
        path = self.work / "ranges.json"
        if not path.exists():
            replace(path, json.dumps(runs.ranges(self._runs, self.target.filling)))
        return [runs.Range(*each) for each in _json(path)]

    @cached_property
    def _runs(self) -> list[runs.Run]:
        return [runs.Run(self.work / name) for name in self.names]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_runs"}

    def missing(self, kind: str, count: int) -> list[int]:
        """Return the numbers of "part" or "file" that are not done."""
        there = set(os.listdir(self.work))
        return [number for number in range(count) if f"{kind}-{number:06}.json" not in there]

    def written(self, count: int) -> list[tuple[str, int, Entry]]:
        """Return the names, bytes and entries of the files."""
        return [_json(self.work / f"file-{number:06}.json") for number in range(count)]


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def continued(path: Path, digest: str) -> bool:
    """Whether the work in a folder was begun with these settings."""
    return (path / "settings").exists() and (path / "settings").read_text() == digest


@contextmanager
def folder(path: Path, digest: str, staging: Path, remote: bool) -> Iterator[None]:
    """Begin or continue the work in a folder, as the only process. Work of another source or other settings is deleted.

    Args:
        digest: of what has to be the same when it continues.
        staging: the folder of files until they are complete.
        remote: whether files are written to a store, where those of other work are not deleted.

    Raises:
        WrongState: another process writes there, or it wrote files to a store with other settings.
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
        said = path / "settings"
        if said.exists() and not continued(path, digest):
            if remote and (path / "ranges.json").exists():
                raise WrongState(
                    "This data set was begun with another source or other settings, and may have files at the target. "
                    f"Remove them and the folder {path}, or write to another target."
                )
            warn(f"The source or the settings are not those of the work in {path}: the write begins anew.")
            shutil.rmtree(staging, ignore_errors=True)
            said.unlink()
        temporary = [*path.glob(".*"), *staging.glob(".*")]  # of a process that was killed
        for file in temporary if said.exists() else set(path.iterdir()) - {path / "lock"}:
            file.unlink()
        replace(said, digest)
        yield
    finally:
        os.close(handle)
