"""Several checkpoints in one place: a folder, or anything that fsspec reaches by URL."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hocket.basics.run_folder import is_url
from hocket.errors import CheckpointError, DamagedCheckpointWarning, WrongType, WrongValue
from hocket.help import warn
from hocket.state.ranks import ALONE, Ranks
from hocket_checkpoints.ranking import BEST, best_of
from hocket_checkpoints.storage import disk, format as formats, locks, manifest as manifests, partials
from hocket_checkpoints.storage.locks import InUse, Lock
from hocket_checkpoints.storage.manifest import LATEST, Manifest, Unfinished

if TYPE_CHECKING:
    import torch

    from hocket_checkpoints.storage.format import Like
    from hocket_checkpoints.storage.snapshot import Snapshot

_NAME = re.compile(r"[A-Za-z0-9_][\w.=+-]*", re.ASCII)


class Place(Protocol):
    """The place where a store keeps its checkpoints. Every method raises CheckpointError if the place fails."""

    @property
    def where(self) -> str:
        """The canonical path or URL."""

    def manifests(self) -> dict[str, Manifest | str]:
        """Return by checkpoint the manifest, or the problem with it."""

    def lock(self, run: str) -> Lock:
        """Keep other runs from writing. Raises InUse if one does."""

    def clean(self) -> None:
        """Remove the files of interrupted writers."""

    def write(self, name: str, snapshot: Snapshot, about: Mapping[str, Any], ranks: Ranks) -> None:
        """Write a checkpoint; see `format.write`."""

    def damage(self, name: str) -> list[str]:
        """Return the problems of a checkpoint; see `format.damage`."""

    def fetch(self, name: str, only: Sequence[str] | None, like: Like | None, ranks: Ranks = ALONE) -> Path:
        """Return a local folder with at least the files that `format.read` reads. Ranks on one host may get the same folder."""

    def discard(self, folder: Path) -> None:
        """Remove a folder that was fetched, once all ranks have read it."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""

    def latest(self) -> str | None:
        """Return the content of the file `LATEST`."""

    def point(self, name: str | None) -> None:
        """Replace the file `LATEST` atomically, or remove it."""


#: Errors of folders that stay. ENOENT: the folder cannot be created, as in /proc.
_LASTING = (errno.EROFS, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP)


class Store:
    """The checkpoints of one run. One run at a time writes to it; any number may read.

    Args:
        folder: a local folder, made when it is first written to, or a URL such as ``s3://bucket/run``, which needs
            the extra ``remote``. A relative path refers to the current working directory.
            Links in it are not checkpoints.
        options: for the file system of a URL, as in ``fsspec.filesystem``.

    Example:
        >>> import tempfile, torch
        >>> from hocket.checkpoints import Store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(folder)
        ...     store.save("step-1", {"weights": torch.zeros(3)}, {"loss": 0.5})
        ...     store.latest(), store.read("step-1")["weights"]
        ('step-1', tensor([0., 0., 0.]))
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        self._place = _place(folder, options)
        self.folder = folder
        self._lock = threading.Lock()
        #: The run that holds the lock, and the lock, if it could be acquired.
        self._run: str | None = None
        self._held: Lock | None = None

    @property
    def where(self) -> str:
        """The canonical path or URL of the store."""
        return self._place.where

    def __repr__(self) -> str:
        return f"Store({os.fspath(self.folder)!r})"

    def __str__(self) -> str:
        return os.fspath(self.folder)

    def save(
        self,
        name: str,
        tree: Mapping[str, Any] | Snapshot,
        about: Mapping[str, Any],
        ranks: Ranks = ALONE,
        may_replace: Callable[[str, Mapping[str, Any] | None], bool] = lambda name, about: True,
    ) -> None:
        """Write a checkpoint (see `format.write`) and, once it is complete, have ``latest`` name it.

        If there is a checkpoint of that name, ``may_replace`` is called with the name and its description.
        Raises CheckpointError if writing fails; the message gives the state of the earlier checkpoints.
        """
        from hocket_checkpoints.storage.snapshot import Snapshot

        _check_name(name)
        snapshot = tree if isinstance(tree, Snapshot) else ranks.agree(lambda: Snapshot(tree, ranks.rank))

        there: dict[str, Manifest | str] = {}

        def begin() -> float:
            if self._run is not None:
                self.acquire(self._run)
            self._place.clean()
            there.update(self._place.manifests())
            if name in there and not may_replace(name, _about(there[name])):
                raise CheckpointError(f"'{name}' is of another run, and is not replaced. Give another folder.")
            # Order must not depend on clocks, which differ between the hosts that a run moves over.
            last = max((each.written for each in there.values() if isinstance(each, Manifest)), default=0.0)
            return max(time.time(), last + 1e-3)

        with self._lock:
            written = ranks.first(begin)
            try:
                self._place.write(name, snapshot, {**about, "written": written}, ranks)
                ranks.first(lambda: self._place.point(name))
            except CheckpointError as error:
                if ranks.rank:
                    raise
                raise CheckpointError(f"{error}{self._others(name, there)}") from error

    def _others(self, name: str, before: Mapping[str, Manifest | str]) -> str:
        """Return a sentence on the state of the other checkpoints."""
        try:
            now = self._place.manifests()
        except (CheckpointError, OSError):
            return " What has become of the checkpoints before it is not known: the store cannot be read either."
        others = {each: found for each, found in before.items() if each != name and isinstance(found, Manifest)}
        if lost := [each for each, found in others.items() if now.get(each) != found]:
            return f" Of the checkpoints before it these are not found as they were: {', '.join(lost)}."
        return " The checkpoints before it are as they were." if others else ""

    def acquire(self, run: str) -> str | None:
        """Keep other runs from writing until `release`; ``run`` is shown to them. Raises InUse if another run is writing.

        Returns why the folder cannot be written to as it is, or None. A temporary failure returns None: writing locks again,
        and reports it.
        """
        self._run = run
        try:
            if self._held is None:
                self._held = self._place.lock(run)
            else:
                self._held.check()
        except InUse:
            raise
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            return error.strerror
        except OSError as error:
            return error.strerror if error.errno in _LASTING else None
        except CheckpointError:
            pass
        return None

    def release(self) -> None:
        """Let other runs write."""
        held, self._held, self._run = self._held, None, None
        if held is not None:
            held.release()

    def names(self) -> list[str]:
        """Return the names of checkpoints with a valid manifest, in the order in which they were written, newest last."""
        return list(self._valid())

    def named(self, name: str) -> str:
        """Return the name of a checkpoint; ``latest`` stands for the newest, if there is one, and ``best`` for the best.

        Raises CheckpointError if there are checkpoints, and none of this name nor one that is ranked as the best.
        """
        there = self.abouts() if name in (LATEST, BEST) else {}
        if not there or name in there:
            return name
        found = next(reversed(there)) if name == LATEST else best_of(there)
        if found is None:
            raise CheckpointError(
                f"{self} has no '{BEST}' checkpoint: its run ranked none by «best=(metric, 'max' or 'min', number)» of "
                f"«hocket.Checkpoints¦checkpoints». It has {', '.join(there)}. Give one of these, or '{LATEST}'."
            )
        return found

    def abouts(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of these, in the same order, read at one moment."""
        return {name: formats.decode_about(each) for name, each in self._valid().items()}

    def existing(self, unfinished: bool = False) -> dict[str, dict[str, Any] | None]:
        """Return the descriptions of all finished checkpoints; those with a damaged manifest come first, with None.

        Args:
            unfinished: also those without a manifest, with None.
        """
        found = self._place.manifests()
        left_out = (Manifest,) if unfinished else (Manifest, Unfinished)
        damaged = [name for name, each in found.items() if not isinstance(each, left_out)]
        return {**dict.fromkeys(sorted(damaged)), **{name: _about(each) for name, each in _in_order(found).items()}}

    def _valid(self) -> dict[str, Manifest]:
        return _in_order(self._place.manifests())

    def about(self, name: str) -> dict[str, Any]:
        """Return the writer's description of a checkpoint."""
        return formats.decode_about(self._manifest(name))

    def latest(self) -> str | None:
        """Return the name of the newest undamaged checkpoint, after checking every byte; None if there is none.

        Damaged ones are skipped with a `DamagedCheckpointWarning` that names the problem. From a URL the checkpoint is
        downloaded, and kept for `read`.
        """
        for name in self._newest_first():
            problems = self._place.damage(name)
            if not problems:
                return name
            self._warn_skipped(name, " ".join(problems))
        return None

    def read(
        self,
        name: str,
        *,
        device: torch.device | str = "cpu",
        only: Sequence[str] | None = None,
        like: Like | None = None,
        ranks: Ranks = ALONE,
    ) -> dict[str, Any]:
        """Read the tree of a checkpoint; see `format.read`. All ``ranks`` call this together.

        From a URL it is downloaded once per host, and the download removed.
        """
        ranks.agree(partial(self._manifest, name))
        folder = self._place.fetch(name, only, like, ranks)
        try:
            return ranks.agree(partial(formats.read, folder, device=device, only=only, like=like))
        finally:
            self._place.discard(folder)

    def read_latest(self, like: Like | None = None, ranks: Ranks = ALONE) -> tuple[str, dict[str, Any]] | None:
        """Return name and tree of the newest checkpoint that every rank can read its part of; None if there is none.

        Damaged ones are skipped as by `latest`, but every byte is read only once. Raises CheckpointError if not all ranks
        see the same checkpoints.
        """
        for name in ranks.first(self._newest_first):
            ranks.agree(partial(self._manifest, name))
            try:
                return name, self.read(name, like=like, ranks=ranks)
            except CheckpointError as error:
                self._warn_skipped(name, str(error))
        return None

    def fetch(self, name: str, only: Sequence[str] | None = None, like: Like | None = None) -> Path:
        """Return a local folder with the checkpoint, or with the files of it that `read` reads.

        From a URL it is removed with this Store, or when the checkpoint is read.
        """
        self._manifest(name)
        return self._place.fetch(name, only, like)

    def _newest_first(self) -> list[str]:
        for name, problem in sorted(self._place.manifests().items()):
            if isinstance(problem, str):
                warn(f"{self} skips '{name}': {problem}", DamagedCheckpointWarning)
        return self.names()[::-1]

    def _warn_skipped(self, name: str, problem: str) -> None:
        warn(f"{self} skips '{name}', which is damaged: {problem}", DamagedCheckpointWarning)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, valid or not."""
        _check_name(name)
        with self._lock:
            if name not in self._place.manifests():
                raise CheckpointError(self._absent(name))
            self._place.remove(name)
            if self._place.latest() == name:
                self._place.point(next(reversed(self.names()), None))

    def _manifest(self, name: str) -> Manifest:
        _check_name(name)
        found = self._place.manifests().get(name)
        if found is None:
            raise CheckpointError(self._absent(name))
        if isinstance(found, str):
            raise CheckpointError(found)
        return found

    def _absent(self, name: str) -> str:
        return f"{self} has no checkpoint '{name}'. It has: {', '.join(self.names()) or 'none'}."


def _in_order(found: Mapping[str, Manifest | str]) -> dict[str, Manifest]:
    valid = [(name, each) for name, each in found.items() if isinstance(each, Manifest)]
    return dict(sorted(valid, key=lambda item: (item[1].written, item[0])))


def _about(found: Manifest | str) -> dict[str, Any] | None:
    try:
        return None if isinstance(found, str) else {**formats.decode_about(found), "written": found.written}
    except CheckpointError:
        return None


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == LATEST:
        raise WrongValue(
            f"{name!r} is not a name for a checkpoint. Use letters, digits and . _ - = +, as in 'ep2-ba1000'."
        )


def _place(folder: str | os.PathLike[str], options: Mapping[str, Any]) -> Place:
    """Return the place of a folder or URL. Raises TypeError for options of a local folder."""
    if is_url(folder):
        from hocket_checkpoints.storage.remote import Remote

        return Remote(os.fspath(folder), **options)
    if options:
        raise WrongType(f"Options ({', '.join(options)}) are for URLs, and {folder} is a local folder.")
    return Local(Path(folder).absolute())  # processes change their working directory


class Local:
    """A `Place` on this machine's disks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def where(self) -> str:
        return os.path.realpath(self.folder)

    def manifests(self) -> dict[str, Manifest | str]:
        found: dict[str, Manifest | str] = {}
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            if not _NAME.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
                continue
            try:
                names = [file.name for file in entry.iterdir()]
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError as error:
                found[entry.name] = f"{entry} cannot be read: {error.strerror}."
                continue
            if manifests.NAME in names or any(manifests.FILES.fullmatch(name) for name in names):
                try:
                    found[entry.name] = manifests.load(entry)
                except CheckpointError as error:
                    found[entry.name] = str(error) if manifests.NAME in names else Unfinished(error)
        return found

    def lock(self, run: str) -> Lock:
        return locks.FileLock(self.folder, run)

    def clean(self) -> None:
        partials.clean(self.folder)
        for file in self.folder.glob(f".{LATEST}.*"):
            with suppress(OSError):
                file.unlink()

    def write(self, name: str, snapshot: Snapshot, about: Mapping[str, Any], ranks: Ranks) -> None:
        formats.write(self.folder / name, snapshot, about, ranks)

    def damage(self, name: str) -> list[str]:
        return formats.damage(self.folder / name)

    def fetch(self, name: str, only: Sequence[str] | None, like: Like | None, ranks: Ranks = ALONE) -> Path:
        return self.folder / name

    def discard(self, folder: Path) -> None:
        """Do nothing: the folder is the checkpoint itself."""

    def remove(self, name: str) -> None:
        try:
            shutil.rmtree(partials.aside(self.folder / name))
        except OSError as error:
            raise CheckpointError(f"{self.folder / name} was not removed: {error}.") from error

    def latest(self) -> str | None:
        return manifests.pointed(self.folder / LATEST)

    def point(self, name: str | None) -> None:
        file = self.folder / LATEST
        try:
            if name is None:
                file.unlink(missing_ok=True)
                return
            temporary = self.folder / f".{LATEST}.{os.urandom(8).hex()}"
            with temporary.open("x") as opened:
                opened.write(f"{name}\n")
                opened.flush()
                os.fsync(opened.fileno())
            temporary.replace(file)
        except OSError as error:
            raise CheckpointError(
                f"{file} could not be replaced: {disk.reason(error, file)}. The checkpoints themselves are complete."
            ) from error
