"""Which run this is, and the folder that belongs to it alone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The file in a run's folder that says whose it is.
RECORD = "run.json"
#: Characters and bytes that a name may have at most, so that it is a file name everywhere.
_LONGEST = 128, 240


@dataclass(frozen=True, slots=True)
class Run:
    """A run's identity, which a resumed run inherits, and its name, which need not be unique."""

    id: str
    name: str
    #: Whether the name was made up, because none was given.
    made_up: bool = False

    @classmethod
    def new(cls, name: str | None) -> Run:
        """A run that begins now, named by date and time if not otherwise. Its identity is not drawn from training's numbers."""
        number = os.urandom(16).hex()
        return cls(number, name or f"{time.strftime('%Y%m%d-%H%M%S')}-{number[:4]}", made_up=name is None)


class RunFolderError(ValueError):
    """The folder is that of another run. The message says what to type."""


def check_name(name: Any) -> str | None:
    """Return a name that is one folder's, or None if none was given. Raises TypeError, ValueError."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"run_name={name!r} is {type(name).__name__}; give text, such as 'baseline-1', or None.")
    short = name if len(name) <= 40 else f"{name[:40]}…"
    if "/" in name or "\\" in name:
        raise ValueError(
            f"run_name={short!r} is a path. It is the name of one folder in folder=; give the rest there, such as "
            "folder='runs/sweep', run_name='a'."
        )
    fits = 0 < len(name) <= _LONGEST[0] and len(name.encode(errors="replace")) <= _LONGEST[1]
    if not fits or not name.isprintable() or name != name.strip() or name.startswith("."):
        raise ValueError(
            f"run_name={short!r} is no name of a folder. Give 1 to {_LONGEST[0]} printable characters without / and \\, that "
            "begin with neither a dot nor a space, such as 'baseline-1'; or None for a name with date and time."
        )
    return name


class RunFolder:
    """The folder of a run below ``parent``; made, and marked as this run's, when it is first asked for.

    Args:
        continues: whether this run was resumed. Then files without a mark, which older versions wrote, are its own.
    """

    #: Whether what is written there is still there when the process has ended.
    lasting = True

    def __init__(self, parent: Path, run: Run, continues: bool = False) -> None:
        self.path = parent / run.name
        self._run, self._continues, self._claimed = run, continues, False
        #: Where the run writes checkpoints, and the earlier run whose folder this was.
        self._checkpoints: str | None = None
        self._earlier: str | None = None
        # As it is now: later there may be checkpoints of this run in it.
        self._unmarked = not continues and _has_files(self.path)

    def take_over(self, checkpoints: str) -> None:
        """For a new run that may write its checkpoints there: the folder may be that of an earlier run that did, too.

        That one is over, and never wrote a checkpoint or is replaced. What it logged stays.
        """
        self._checkpoints = checkpoints
        mark = _read_mark(self.path)
        if mark and mark.get("checkpoints") == self._relative(checkpoints):
            self._earlier = mark["run"]

    def moved_from(self, checkpoints: str) -> str | None:
        """For a run that goes on from its checkpoints there: where they were written when it was here last, if elsewhere."""
        self._checkpoints = checkpoints
        mark = _read_mark(self.path)
        before = mark.get("checkpoints") if mark and mark["run"] == self._run.id else None
        if not isinstance(before, str) or before == self._relative(checkpoints):
            return None
        return before if "://" in before else os.path.normpath(os.path.join(os.path.realpath(self.path), before))

    def _relative(self, checkpoints: str) -> str:
        """As the mark has it: both may be moved together."""
        if "://" in checkpoints:
            return checkpoints
        try:
            return Path(os.path.relpath(checkpoints, os.path.realpath(self.path))).as_posix()
        except ValueError:  # another drive
            return checkpoints

    def check(self) -> None:
        """Raise RunFolderError if another run has written into the folder."""
        mark = _read_mark(self.path)
        owner = None if mark is None else mark.get("run")
        if owner == self._run.id or (mark is None and not self._unmarked) or (owner and owner == self._earlier):
            return
        if mark is not None and not owner:
            raise RunFolderError(
                f"{self.path / RECORD} cannot be read, so nobody knows whose files are there. If they are of the run that is "
                "resumed, remove this one file; else give another run_name."
            )
        raise RunFolderError(
            f"{self.path} has the files of another run, which stay as they are. To continue that run, pass resume='auto' and "
            f"its checkpoints=; for a new one, another run_name than {self._run.name!r}, or run_name=None, which makes one "
            "up; or remove the folder, if nobody needs it."
        )

    def claim(self) -> Path:
        """The folder. Raises RunFolderError if it is another run's."""
        if not self._claimed:
            self.check()
            self.path.mkdir(parents=True, exist_ok=True)
            replace = self._continues or (self._earlier is not None)
            checkpoints = None if self._checkpoints is None else self._relative(self._checkpoints)
            _write_mark(self.path, self._run, checkpoints, replace)
            self._earlier = None
            self.check()  # somebody else may have been first
            self._claimed = True
        return self.path


class TemporaryFolder(RunFolder):
    """For a test of a run, which leaves nothing: removed with the object, or when the process ends."""

    lasting = False

    def __init__(self, parent: Path, run: Run) -> None:
        self.path = parent / run.name
        self._made: Path | None = None

    def take_over(self, checkpoints: str) -> None:
        """It is new."""

    def check(self) -> None:
        """Nobody else writes there."""

    def claim(self) -> Path:
        """A folder among the system's temporary ones."""
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix="hocket-test-"))
            weakref.finalize(self, shutil.rmtree, self._made, True)
        return self._made


def _read_mark(folder: Path) -> dict[str, Any] | None:
    """What the mark says; None if there is no mark, nothing if it cannot be read."""
    try:
        mark = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {**mark, "run": str(mark["run"])}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_mark(folder: Path, run: Run, checkpoints: str | None, replace: bool) -> None:
    """Write the mark in one step; unless there is one, if it is not to be replaced."""
    record = folder / RECORD
    before = _read_mark(folder)
    if before is not None and (not replace or (before.get("run"), before.get("checkpoints")) == (run.id, checkpoints)):
        return
    began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    if before and before["run"] == run.id:
        began = before.get("began", began)
    mark = {"run": run.id, "name": run.name, "began": began, "checkpoints": checkpoints}
    temporary = folder / f".{RECORD}.{os.urandom(8).hex()}"
    temporary.write_text(json.dumps(mark) + "\n", encoding="utf-8")
    try:
        if before is not None:
            temporary.replace(record)
        else:
            os.link(temporary, record)  # a rename would replace one that was written meanwhile
    except FileExistsError:
        pass
    except OSError:  # file systems without hard links
        temporary.rename(record)
    finally:
        temporary.unlink(missing_ok=True)


def _has_files(folder: Path) -> bool:
    """Whether there is anything but checkpoints, which have identities of their own."""
    if not folder.is_dir():
        return folder.exists()
    return any(not (entry.name.startswith(".") or _of_checkpoints(entry)) for entry in folder.iterdir())


def _of_checkpoints(entry: Path) -> bool:
    return entry.name == "latest" or any(True for at in ("manifest.json", "*/manifest.json") for _ in entry.glob(at))
