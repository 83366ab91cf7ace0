"""The identity of a run, and its exclusive folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.errors import WrongFile, WrongType, WrongValue

#: The file in a run's folder that names its owner.
RECORD = "run.json"
#: Maximum number of characters and bytes of a name, so that it is a valid file name on all systems.
_MAX_LENGTH = 128, 240


@dataclass(frozen=True, slots=True)
class Run:
    """The identity of a run, which a resumed run inherits, and its name, which need not be unique."""

    id: str
    name: str
    #: Whether the name was generated, because none was given.
    made_up: bool = False

    @classmethod
    def new(cls, name: str | None) -> Run:
        """Return a new run, named by date and time if no name is given. Its id does not consume training's random numbers."""
        number = os.urandom(16).hex()
        return cls(number, name or f"{time.strftime('%Y%m%d-%H%M%S')}-{number[:8]}", made_up=name is None)


class RunFolderError(WrongValue):
    """The folder belongs to another run. The message says what to type."""


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a place is a URL, and not a path of this machine."""
    return "://" in os.fspath(place)


def check_name(name: object) -> str | None:
    """Return the name if it is valid for a folder, or None if none was given. Raises TypeError, ValueError."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise WrongType(f"«run_name={name!r}» is {type(name).__name__}; give text, such as 'baseline-1', or «None».")
    short = name if len(name) <= 40 else f"{name[:40]}…"
    if "/" in name or "\\" in name:
        raise WrongValue(
            f"«run_name={short!r}» is a path. It should be the name of one folder in «folder=»; put the rest of the path "
            "there, such as «folder='runs/sweep'», «run_name='a'»."
        )
    fits = 0 < len(name) <= _MAX_LENGTH[0] and len(name.encode(errors="replace")) <= _MAX_LENGTH[1]
    if not fits or not name.isprintable() or name != name.strip() or name.startswith("."):
        raise WrongValue(
            f"«run_name={short!r}» is not a valid folder name. Give 1 to {_MAX_LENGTH[0]} printable characters without / and "
            "\\, not starting with a dot or a space, such as 'baseline-1'; or «None» for a name with date and time."
        )
    return name


@contextmanager
def writable(folder: Path, write: str) -> Iterator[None]:
    """Let an OSError within say that it is about this folder, and what to write for another."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise WrongFile(
            f"Nothing can be written to {folder}: {why}. Make it a folder that this user may write to, or give another, such "
            f"as {write}."
        ) from error


class RunFolder:
    """The folder of a run below ``parent``. It is created, and marked as this run's, when it is first claimed.

    Args:
        continues: whether this run was resumed. Files without a mark, which older versions wrote, are then its own.
    """

    #: Whether the files persist after the process has ended.
    lasting = True

    def __init__(self, parent: Path, run: Run, continues: bool = False) -> None:
        self.path = parent / run.name
        self._run, self._continues, self._claimed = run, continues, False
        #: Whether the files there are those of this run alone.
        self._own = False
        #: The folder or URL of the run's checkpoints, and the id of the earlier run that owned this folder.
        self._checkpoints: str | None = None
        self._earlier: str | None = None
        # Checked now, because the folder may contain checkpoints of this run later.
        with writable(self.path, "folder='runs'"):
            self._unmarked = not continues and _has_files(self.path)

    def take_over(self, checkpoints: str) -> None:
        """Let a new run with this checkpoint folder take over the run folder of an earlier run that used the same one.

        The earlier run is over: it never wrote a checkpoint, or the new run replaces it. Its logs are kept.
        """
        self._checkpoints = checkpoints
        mark = _read_mark(self.path)
        if mark and mark.get("checkpoints") == self._relative(checkpoints):
            self._earlier = mark["run"]

    def moved_from(self, checkpoints: str) -> str | None:
        """Return the previous checkpoint folder of a resumed run if it differs from ``checkpoints``, else None."""
        self._checkpoints = checkpoints
        mark = _read_mark(self.path)
        before = mark.get("checkpoints") if mark and mark["run"] == self._run.id else None
        if not isinstance(before, str) or before == self._relative(checkpoints):
            return None
        return before if is_url(before) else os.path.normpath(os.path.join(os.path.realpath(self.path), before))

    def _relative(self, checkpoints: str) -> str:
        """Return the path relative to the run folder, as in the mark, so that both folders can be moved together."""
        if is_url(checkpoints):
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
                f"{self.path / RECORD} cannot be read, so the owner of the files there is unknown. If they belong to the run "
                "that is resumed, remove this one file; otherwise give another run_name."
            )
        raise RunFolderError(
            f"{self.path} has the files of another run, which are not changed. To continue that run, pass «resume='auto'» and "
            f"its «checkpoints=». For a new run, pass another run_name than {self._run.name!r}, or «run_name=None» to generate "
            "one; or remove the folder if it is not needed."
        )

    def claim(self) -> Path:
        """Create and mark the folder on the first call, and return it. Raises RunFolderError if another run owns it."""
        if not self._claimed:
            self.check()
            replace = self._continues or (self._earlier is not None)
            checkpoints = None if self._checkpoints is None else self._relative(self._checkpoints)
            with writable(self.path, "folder='runs'"):
                self.path.mkdir(parents=True, exist_ok=True)
                _write_mark(self.path, self._run, checkpoints, replace)
            self._own = not replace
            self._earlier = None
            self.check()  # another process may have been first
            self._claimed = True
        return self.path

    def abandon(self, *names: str) -> None:
        """Remove the folder if this run created it, and it has nothing but its mark and files of these names."""
        files = {entry.name for entry in self.path.iterdir()} if self._claimed and self._own else set()
        if RECORD in files and files <= {RECORD, *names} and (_read_mark(self.path) or {}).get("run") == self._run.id:
            for name in files:
                (self.path / name).unlink()
            self.path.rmdir()
            self._claimed = False

    def files(self) -> list[str]:
        """Return the names of files and folders there, sorted, without checkpoints and marks; empty if another run owns it."""
        from hocket.basics.run_files import SUMMARY

        if not self._claimed:
            return []
        entries = [
            path for path in self.path.iterdir() if not path.name.startswith(".") and path.name not in (RECORD, SUMMARY)
        ]
        return sorted(path.name for path in entries if not _of_checkpoints(path))


class TemporaryFolder(RunFolder):
    """A temporary folder for ``fast_dev_run`` and ``overfit``: removed with the object, or when the process ends."""

    lasting = False

    def __init__(self, parent: Path, run: Run) -> None:
        self.path = parent / run.name
        self._made: Path | None = None

    def take_over(self, checkpoints: str) -> None:
        """Do nothing, since a temporary folder is new."""

    def check(self) -> None:
        """Do nothing, since no other run writes to a temporary folder."""

    def claim(self) -> Path:
        """Create a temporary folder on the first call, and return it."""
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix="hocket-test-"))
            weakref.finalize(self, shutil.rmtree, self._made, True)
        return self._made


def _read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the content of the mark; None without a mark, an empty dict if it cannot be read."""
    try:
        from hocket.basics import safe_files

        mark = safe_files.parsed(safe_files.content(folder / RECORD))
        return {**mark, "run": str(mark["run"])}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_mark(folder: Path, run: Run, checkpoints: str | None, replace: bool) -> None:
    """Write the mark atomically. An existing mark is only overwritten with ``replace``."""
    record = folder / RECORD
    before = _read_mark(folder)
    if before is not None and (not replace or (before.get("run"), before.get("checkpoints")) == (run.id, checkpoints)):
        return
    began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    if before and before["run"] == run.id:
        began = before.get("began", began)
    mark = {"run": run.id, "name": run.name, "began": began, "checkpoints": checkpoints}
    temporary = folder / f".{RECORD}.{os.urandom(8).hex()}"
    with temporary.open("x", encoding="utf-8") as file:  # never what is there already
        file.write(json.dumps(mark) + "\n")
    try:
        if before is not None:
            temporary.replace(record)
        else:
            os.link(temporary, record)  # a rename would overwrite a mark that another process has just written
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        temporary.rename(record)
    finally:
        temporary.unlink(missing_ok=True)


def _has_files(folder: Path) -> bool:
    """Whether the folder contains anything other than checkpoints, which record their own run."""
    if not folder.is_dir():
        return folder.exists()
    return any(not (entry.name.startswith(".") or _of_checkpoints(entry)) for entry in folder.iterdir())


def _of_checkpoints(entry: Path) -> bool:
    return entry.name == "latest" or any(True for at in ("manifest.json", "*/manifest.json") for _ in entry.glob(at))
