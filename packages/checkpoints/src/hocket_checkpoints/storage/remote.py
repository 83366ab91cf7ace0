"""Checkpoints behind a URL: written locally, uploaded and verified; the manifest is uploaded last."""

from __future__ import annotations

import base64
import hashlib
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hocket.errors import CheckpointError, MissingPackage
from hocket.state.ranks import ALONE, Ranks
from hocket_checkpoints.storage import disk, format as formats, manifest as manifests, scratch
from hocket_checkpoints.storage.locks import LEASE, Lease, Lock
from hocket_checkpoints.storage.manifest import LATEST, File, Manifest

if TYPE_CHECKING:
    from hocket_checkpoints.storage.format import Like
    from hocket_checkpoints.storage.snapshot import Snapshot

_T = TypeVar("_T")
#: A private generator, because the global one belongs to the run.
_waits = random.Random()
#: Bytes of a part in s3fs's uploads of large files, which S3's checksum of them depends on.
_PART = 50 << 20
#: Errors that are not retried.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, CheckpointError, TypeError, NotImplementedError)
#: What to type for credentials that the client of a URL misses.
_CREDENTIALS = {
    "s3": " Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the environment; or type: aws configure",
    "gs": " Set GOOGLE_APPLICATION_CREDENTIALS to the file of a key; or type: gcloud auth application-default login",
}
_OTHERS = " Give the credentials that the client of fsspec for this URL reads from the environment."


class _DamagedError(CheckpointError):
    """A checkpoint is damaged, while the store itself works."""


class Remote:
    """A `hocket_checkpoints.storage.store.Place` on any file system of fsspec.

    Operations are attempted up to ``attempts`` times, after waits of ``wait``, 2 × ``wait``, 4 × ``wait`` … seconds.
    The lock of a run that was killed on another machine holds for ``lease`` seconds.
    """

    def __init__(self, url: str, *, attempts: int = 5, wait: float = 0.5, lease: float = LEASE, **options: Any) -> None:
        try:
            from fsspec.core import url_to_fs

            # Attempts are counted here, and botocore's waits draw from the run's random numbers.
            if url.startswith("s3://"):
                options.setdefault("config_kwargs", {}).setdefault("retries", {"max_attempts": 0})
            # No cached listings, because other processes write, and objects may be lost.
            self._fs, root = url_to_fs(url, **{"use_listings_cache": False, "skip_instance_cache": True, **options})
        except ImportError as error:
            from hocket.help import installing

            scheme, advice = url.partition("://")[0], installing.command("remote")
            advice += "" if scheme == "s3" else f", and fsspec's package for {scheme}://"
            raise MissingPackage(f"{url} cannot be reached: {error}. Type: {advice}") from error
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")
        self._attempts, self._wait, self._lease = attempts, wait, lease
        #: Completely downloaded checkpoints, kept by `damage`: by SHA-256 of the manifest.
        self._complete: dict[str, Path] = {}

    @property
    def where(self) -> str:
        return self._url

    def manifests(self) -> dict[str, Manifest | str]:
        folders = self._folders()
        paths = {name: f"{self._root}/{name}/{manifests.NAME}" for name in folders}
        found: dict[str, Manifest | str] = {}
        for name, path in paths.items():
            try:
                raw = self._cat(path)
            except FileNotFoundError:
                if any(manifests.FILES.fullmatch(file) for file in self._files(name)):
                    found[name] = manifests.Unfinished(
                        f"{self._url}/{name} has no {manifests.NAME}: its upload did not end."
                    )
                continue
            except _DamagedError as error:
                found[name] = str(error)
                continue
            try:
                found[name] = manifests.parse(raw, f"{self._url}/{name}/{manifests.NAME}")
            except CheckpointError as error:
                found[name] = str(error)
        return found

    def lock(self, run: str) -> Lock:
        return self._try("lock", Lease, self._fs, self._root, self._url, run, self._lease, self._try)

    def clean(self) -> None:
        for name in self._folders():
            files = self._files(name)
            if manifests.NAME not in files and files and all(manifests.FILES.fullmatch(file) for file in files):
                self._delete(name, files)

    def write(self, name: str, snapshot: Snapshot, about: Mapping[str, Any], ranks: Ranks) -> None:
        folder = ranks.agree(_scratch)
        try:

            def part() -> formats.Part:
                with disk.errors(folder):
                    part = formats.write_part(folder, snapshot, ranks)
                self.put(name, folder, part.files)
                return part

            def end() -> None:
                with disk.errors(folder):
                    formats.finish(folder, snapshot, parts, about)
                files = manifests.load(folder).files
                raw = (folder / manifests.NAME).read_bytes()
                whole = File(len(raw), hashlib.sha256(raw).hexdigest())
                tree = next(iter(files))
                self._put(name, folder, {tree: files[tree], manifests.NAME: whole})
                there = self._files(name)
                self._delete(name, [file for file in there if manifests.FILES.fullmatch(file) and file not in files])

            parts = ranks.gather(ranks.agree(part))
            ranks.first(end)
        finally:
            scratch.end(folder)

    def copy(self, folder: Path) -> None:
        """Upload a complete checkpoint from a local folder, under the same name, its manifest last."""
        manifest = manifests.load(folder)
        raw = (folder / manifests.NAME).read_bytes()
        own = File(len(raw), hashlib.sha256(raw).hexdigest())
        self.put(folder.name, folder, {**manifest.files, manifests.NAME: own})

    def put(self, name: str, folder: Path, files: Mapping[str, File]) -> None:
        """Upload files of a local folder in this order, and verify them."""
        if self._root.startswith("/"):  # else it begins with a bucket, without folders, and not ours to make
            for parent in {f"{self._root}/{name}/{file}".rpartition("/")[0] for file in files}:
                self._try(f"make {parent}", self._fs.makedirs, parent, exist_ok=True)
        self._put(name, folder, files)

    def _put(self, name: str, folder: Path, files: Mapping[str, File]) -> None:
        for file, stated in files.items():
            path = f"{self._root}/{name}/{file}"
            try:
                self._try(f"upload {path}", self._upload, folder / file, path, stated)
            except _FINAL as error:
                raise self._error(f"upload {path}", error) from error

    def damage(self, name: str) -> list[str]:
        try:
            folder = self.fetch(name, None, None)
        except _DamagedError as error:
            return [str(error)]
        for other in {*self._complete.values()} - {folder}:
            self.discard(other)
        if problems := formats.damage(folder):
            self.discard(folder)
        else:
            self._complete[manifests.load(folder).sha256] = folder
        return problems

    def fetch(self, name: str, only: Sequence[str] | None, like: Like | None, ranks: Ranks = ALONE) -> Path:
        folder, manifest, files = ranks.agree(partial(self._begin, name, only, like))
        try:
            return self._download_together(folder, name, manifest, files, ranks)
        except CheckpointError:
            self.discard(folder)
            raise

    def _download_together(
        self, folder: Path, name: str, manifest: Manifest, files: Sequence[str], ranks: Ranks
    ) -> Path:
        # Ranks that see the folder of a lower rank use that one: each of them downloads some of the files that they need.
        folders = ranks.gather(folder)
        leader = next(rank for rank, each in enumerate(folders) if each.is_dir())
        announced = ranks.gather((leader, files))
        group = [rank for rank, (its, _) in enumerate(announced) if its == leader]
        wanted = sorted({file for rank in group for file in announced[rank][1]})
        mine = wanted[group.index(ranks.rank) :: len(group)]
        ranks.agree(partial(self._get, name, manifest, mine, folders[leader]))
        if all(its != ranks.rank for its, _ in announced):
            self.discard(folder)
        downloaded: Path = folders[leader]
        return downloaded

    def discard(self, folder: Path) -> None:
        self._complete = {sha256: each for sha256, each in self._complete.items() if each != folder}
        scratch.end(folder.parent)

    def remove(self, name: str) -> None:
        files = self._files(name)
        self._delete(name, sorted(files, key=lambda file: file != manifests.NAME))

    def latest(self) -> str | None:
        try:
            return self._cat(f"{self._root}/{LATEST}").decode().strip()
        except (FileNotFoundError, UnicodeDecodeError, _DamagedError):
            return None

    def point(self, name: str | None) -> None:
        path = f"{self._root}/{LATEST}"
        if name is None:
            self._try(f"remove {path}", self._fs.rm_file, path)
        else:
            self._try(f"write {path}", self._fs.pipe_file, path, f"{name}\n".encode())

    # --- files

    def _folders(self) -> list[str]:
        return [
            name for name, kind in self._list(self._root).items() if kind == "directory" and not name.startswith(".")
        ]

    def _files(self, name: str) -> list[str]:
        return [file for file, kind in self._list(f"{self._root}/{name}").items() if kind == "file"]

    def _list(self, path: str) -> dict[str, str]:
        try:
            self._fs.invalidate_cache()
            found = self._try(f"list {path}", self._fs.ls, path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {
            each["name"].rstrip("/").rpartition("/")[2]: each["type"]
            for each in found
            if each["name"].rstrip("/") != path
        }

    def _delete(self, name: str, files: Sequence[str]) -> None:
        for file in files:
            path = f"{self._root}/{name}/{file}"
            try:
                self._try(f"remove {path}", self._fs.rm_file, path)
            except FileNotFoundError:
                continue
        if not self._files(name):
            try:
                self._fs.rmdir(f"{self._root}/{name}")
            except Exception:  # object stores have no folders that could be removed
                return

    def _upload(self, local: Path, path: str, stated: File) -> None:
        self._fs.put_file(str(local), path)
        self._fs.invalidate_cache()
        info = self._fs.info(path)
        if info["size"] != stated.size:
            raise OSError(f"{path} has {info['size']} bytes there, and {stated.size} here")
        tag = str(info.get("ETag") or info.get("etag") or "").strip('"')
        if (tag and tag in _etags(local)) or info.get("md5Hash") == base64.b64encode(_md5(local.read_bytes())).decode():
            return
        digest = hashlib.sha256()
        with self._fs.open(path, "rb") as opened:  # the server states no comparable checksum: read the file back
            while part := opened.read(1 << 22):
                digest.update(part)
        if digest.hexdigest() != stated.sha256:
            raise OSError(f"{path} has another content there than here")

    def _begin(self, name: str, only: Sequence[str] | None, like: Like | None) -> tuple[Path, Manifest, list[str]]:
        """Return a folder with the manifest and the tree, or with the complete checkpoint; and the files that it lacks."""
        raw = self._cat(f"{self._root}/{name}/{manifests.NAME}")
        manifest = manifests.parse(raw, f"{self._url}/{name}/{manifests.NAME}")
        if manifest.sha256 in self._complete:
            return self._complete[manifest.sha256], manifest, []
        parent = _scratch()
        weakref.finalize(self, scratch.end, parent)
        folder = parent / name
        try:
            folder.mkdir()
            (folder / manifests.NAME).write_bytes(raw)
            self._get(name, manifest, [manifest.tree], folder)
            part = bool(only or like)
            shards = [file for file in manifest.files if file != manifest.tree]
            return folder, manifest, formats.needed(folder, only, like) if part else shards
        except CheckpointError:
            scratch.end(parent)
            raise

    def _get(self, name: str, manifest: Manifest, files: Sequence[str], folder: Path) -> None:
        for file in files:
            path = f"{self._root}/{name}/{file}"
            try:
                self._check_size(path, manifest.files[file])
                self._try(f"download {path}", self._fs.get_file, path, str(folder / file))
            except FileNotFoundError:
                (folder / file).unlink(missing_ok=True)  # reading reports missing files by name

    def _check_size(self, path: str, stated: File) -> None:
        """Check type and size before the download, because reading a device or pipe might never end."""
        info = self._try(f"look at {path}", self._fs.info, path)
        if info["type"] != "file":
            raise _DamagedError(f"{path}: it is not a regular file, and such are not read.")
        if info["size"] not in (None, stated.size):
            raise _DamagedError(f"{path}: it has {info['size']} bytes and not the {stated.size} that were written.")

    def _cat(self, path: str) -> bytes:
        """Return the content of a small file."""
        info = self._try(f"read {path}", self._fs.info, path)
        if info["type"] != "file" or (info["size"] or 0) > manifests.LIMIT:
            raise _DamagedError(f"{path}: it is not a regular file, or has more than {manifests.LIMIT} bytes.")
        return bytes(self._try(f"read {path}", self._fs.cat_file, path))

    def _try(self, what: str, function: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T:
        for attempt in range(self._attempts):
            try:
                return function(*arguments, **keywords)
            except _FINAL:
                raise
            except Exception as error:  # each file system has errors of its own
                if attempt == self._attempts - 1 or "Credential" in type(error).__name__:
                    raise self._error(what, error) from error
                time.sleep(self._wait * 2**attempt * _waits.uniform(0.8, 1.2))
        raise AssertionError("unreachable")

    def _error(self, what: str, error: Exception) -> CheckpointError:
        kind = type(error).__name__
        times = f" in {self._attempts} attempts" if not (isinstance(error, _FINAL) or "Credential" in kind) else ""
        advice = _CREDENTIALS.get(self._url.partition("://")[0], _OTHERS) if "Credential" in kind else ""
        return CheckpointError(f"Could not {what} ({self._url}){times}: {kind}: {str(error).rstrip('.')}.{advice}")


def _scratch() -> Path:
    try:
        return scratch.begin()
    except OSError as error:
        raise CheckpointError(
            f"There is no room for temporary files (set TMPDIR to another folder): {error}."
        ) from error


def _etags(local: Path) -> set[str]:
    """Return the two checksums that S3 may state for a file: of a single upload, and of one in s3fs's parts."""
    whole, parts = hashlib.md5(usedforsecurity=False), []
    with local.open("rb") as opened:
        while part := opened.read(_PART):
            whole.update(part)
            parts.append(_md5(part))
    return {whole.hexdigest(), f"{_md5(b''.join(parts)).hex()}-{len(parts)}"}


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
