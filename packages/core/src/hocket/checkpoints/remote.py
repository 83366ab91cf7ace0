"""Checkpoints behind a URL: written here, uploaded, confirmed, and only then made known by their manifest."""

from __future__ import annotations

import base64
import hashlib
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hocket.checkpoints import disk
from hocket.checkpoints import format as formats
from hocket.checkpoints import manifest as manifests
from hocket.checkpoints.errors import CheckpointError
from hocket.checkpoints.manifest import LATEST, File, Manifest

if TYPE_CHECKING:
    from hocket.checkpoints.format import Like
    from hocket.checkpoints.ranks import Ranks
    from hocket.checkpoints.snapshot import Snapshot

_T = TypeVar("_T")
#: Not the global random numbers, which are the run's.
_waits = random.Random()
#: Bytes of a part in s3fs's uploads of large files, which S3's checksum of them depends on.
_PART = 50 << 20
#: Errors that no second attempt mends.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, CheckpointError, TypeError, NotImplementedError)


class Remote:
    """A `hocket.checkpoints.store.Place` on any file system of fsspec.

    Attempts that fail are repeated ``attempts`` times in all, after ``wait``, 2 × ``wait``, 4 × ``wait`` … seconds.
    """

    def __init__(self, url: str, *, attempts: int = 5, wait: float = 0.5, **options: Any) -> None:
        try:
            from fsspec.core import url_to_fs

            # Listings change under a cache: other processes write, and objects may be lost.
            self._fs, root = url_to_fs(url, **{"use_listings_cache": False, "skip_instance_cache": True, **options})
        except ImportError as error:
            scheme = url.partition("://")[0]
            advice = "pip install 'hocket[remote]'" + (
                "" if scheme == "s3" else f", and fsspec's package for {scheme}://"
            )
            raise ImportError(f"{url} cannot be reached: {error}. Run: {advice}") from error
        self._root = root.rstrip("/")
        self._url = url.rstrip("/")
        self._attempts, self._wait = attempts, wait
        self._downloads: dict[str, Path] = {}
        """By SHA-256 of the manifest: checkpoints that `damage` fetched whole."""

    def manifests(self) -> dict[str, Manifest | str]:
        folders = self._folders()
        paths = {name: f"{self._root}/{name}/{manifests.NAME}" for name in folders}
        found: dict[str, Manifest | str] = {}
        for name, path in paths.items():
            try:
                raw = self._try(f"read {path}", self._fs.cat_file, path)
            except FileNotFoundError:
                if any(manifests.FILES.fullmatch(file) for file in self._files(name)):
                    found[name] = manifests.Unfinished(
                        f"{self._url}/{name} has no {manifests.NAME}: its upload did not end."
                    )
                continue
            try:
                found[name] = manifests.parse(raw, f"{self._url}/{name}/{manifests.NAME}")
            except CheckpointError as error:
                found[name] = str(error)
        return found

    def clean(self) -> None:
        for name in self._folders():
            files = self._files(name)
            if manifests.NAME not in files and files and all(manifests.FILES.fullmatch(file) for file in files):
                self._delete(name, files)

    def write(self, name: str, snapshot: Snapshot, about: Mapping[str, Any], ranks: Ranks) -> None:
        with tempfile.TemporaryDirectory(prefix="hocket-checkpoint-", ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary)

            def part() -> formats.Part:
                with disk.errors(folder):
                    part = formats.write_part(folder, snapshot, ranks)
                if self._root.startswith("/"):  # else it begins with a bucket, without folders, and not ours to make
                    self._try(f"make {self._root}/{name}", self._fs.makedirs, f"{self._root}/{name}", exist_ok=True)
                self._put(name, folder, part.files)
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

    def _put(self, name: str, folder: Path, files: Mapping[str, File]) -> None:
        for file, stated in files.items():
            path = f"{self._root}/{name}/{file}"
            try:
                self._try(f"upload {path}", self._upload, folder / file, path, stated)
            except _FINAL as error:
                raise self._error(f"upload {path}", error) from error

    def damage(self, name: str) -> list[str]:
        return formats.damage(self._download(name, None, None))

    def fetch(self, name: str, only: Sequence[str] | None, like: Like | None) -> Path:
        return self._download(name, only, like)

    def remove(self, name: str) -> None:
        files = self._files(name)
        self._delete(name, sorted(files, key=lambda file: file != manifests.NAME))

    def latest(self) -> str | None:
        try:
            return str(self._try("read latest", self._fs.cat_file, f"{self._root}/{LATEST}").decode().strip())
        except FileNotFoundError:
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
        with self._fs.open(path, "rb") as opened:  # a server that says nothing that could be compared is read back
            while part := opened.read(1 << 22):
                digest.update(part)
        if digest.hexdigest() != stated.sha256:
            raise OSError(f"{path} has another content there than here")

    def _download(self, name: str, only: Sequence[str] | None, like: Like | None) -> Path:
        """A folder with the files of a checkpoint that are there."""
        raw = self._try("read the manifest", self._fs.cat_file, f"{self._root}/{name}/{manifests.NAME}")
        manifest = manifests.parse(raw, f"{self._url}/{name}/{manifests.NAME}")
        if manifest.sha256 in self._downloads:
            return self._downloads[manifest.sha256]
        self._downloads.clear()
        parent = Path(tempfile.mkdtemp(prefix="hocket-checkpoint-"))
        weakref.finalize(self, shutil.rmtree, parent, True)
        folder = parent / name
        folder.mkdir()
        (folder / manifests.NAME).write_bytes(raw)
        self._get(name, [manifest.tree], folder)
        part = bool(only or like)
        self._get(name, formats.needed(folder, only, like) if part else manifest.files, folder)
        if not part:
            self._downloads[manifest.sha256] = folder
        return folder

    def _get(self, name: str, files: Sequence[str] | Mapping[str, File], folder: Path) -> None:
        for file in files:
            path = f"{self._root}/{name}/{file}"
            try:
                self._try(f"download {path}", self._fs.get_file, path, str(folder / file))
            except FileNotFoundError:
                (folder / file).unlink(missing_ok=True)  # what is missing is told by name when it is read

    def _try(self, what: str, function: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T:
        for attempt in range(self._attempts):
            try:
                return function(*arguments, **keywords)
            except _FINAL:
                raise
            except Exception as error:  # each file system has errors of its own
                if attempt == self._attempts - 1:
                    raise self._error(what, error) from error
                time.sleep(self._wait * 2**attempt * _waits.uniform(0.8, 1.2))
        raise AssertionError("unreachable")

    def _error(self, what: str, error: Exception) -> CheckpointError:
        times = f" in {self._attempts} attempts" if not isinstance(error, _FINAL) else ""
        return CheckpointError(
            f"Could not {what} ({self._url}){times}: {type(error).__name__}: {error}. "
            "The checkpoints that were there before are as they were."
        )


def _etags(local: Path) -> set[str]:
    """The two checksums that S3 may state for a file: uploaded at once, or in s3fs's parts."""
    whole, parts = hashlib.md5(usedforsecurity=False), []
    with local.open("rb") as opened:
        while part := opened.read(_PART):
            whole.update(part)
            parts.append(_md5(part))
    return {whole.hexdigest(), f"{_md5(b''.join(parts)).hex()}-{len(parts)}"}


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
