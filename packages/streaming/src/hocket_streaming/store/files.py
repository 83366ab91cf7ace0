"""`Files`: the files of a data set behind a URL or a path, read whole or in part, with further attempts where a store fails."""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hocket.basics.masking import masked
from hocket.basics.safe_files import replacing
from hocket_streaming.errors import DamagedData, MissingData, StreamError, Unreachable
from hocket_streaming.store.clients import client, within
from hocket_streaming.store.paths import above, absolute
from hocket_streaming.store.retrying import Attempts, failed, final

T = TypeVar("T")


class Files:
    """The files of a data set, on disk or in a store that fsspec knows. No connection is opened before it is needed.

    Objects are small, and are pickled into worker processes; a forked or spawned process opens connections of its own.

    Args:
        path: a folder, a file, or several files, as paths or URLs such as ``"s3://bucket/data"``.
        storage_options: arguments of fsspec's file system, such as ``{"anon": True}``.

    Attributes:
        path: the root: the folder, or the one file; the folder above several files.
        local: whether the files are on a disk of this machine.

    Errors: `MissingData`, `AccessDenied`, `Unreachable` and others of `hocket_streaming.errors`. On disk, over HTTP and S3 they
    come within 10 s of a fault; clients of other stores may first retry by rules of their own.

    Example:

        >>> import tempfile
        >>> from hocket_streaming.store.files import Files
        >>> files = Files(tempfile.mkdtemp())
        >>> files.write("a/b.bin", b"0123456789")
        >>> files.names(), files.read("a/b.bin", start=2, size=3)
        ({'a/b.bin': 10}, b'234')
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        given = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        if not given:
            raise StreamError(
                "path names no file. Give a folder, a file or a list of files, such as path='s3://bucket/data'."
            )
        roots = [absolute(os.fspath(one)) for one in given]
        self.storage_options = dict(storage_options or {})
        self._only: list[str] | None = None
        self._remembered: dict[str, tuple[int, str]] | None = None
        self.path = roots[0]
        if not isinstance(path, (str, os.PathLike)):
            self.path = above(roots)
            self._only = sorted(root[len(self.path) + 1 :] for root in roots)
        self.protocol = self.path.partition("://")[0] if "://" in self.path else "file"
        self.local = self.protocol == "file"
        self._is_one_file: bool | None = False if self._only else None
        self._folder_slash = os.fspath(given[0]).endswith("/")

    def __repr__(self) -> str:
        return f"Files({masked(self.path)!r})"

    def names(self) -> dict[str, int]:
        """Return the files below the root and their sizes in bytes, sorted by name. A root that is a file has itself."""
        return {name: size for name, (size, _) in self._listing().items()}

    def listed(self) -> dict[str, int]:
        """Return the same, or nothing where the store cannot list its files. Raises Unreachable where it does not answer."""
        try:
            return self.names()
        except Unreachable:
            raise
        except OSError:
            return {}

    def version(self, names: Iterable[str]) -> str:
        """Return a digest of files by their sizes and what the store says of their contents: ETags, or times of change."""
        listing = self._listing()
        text = repr([(name, listing.get(name)) for name in sorted(names)])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @contextmanager
    def listed_once(self) -> Iterator[None]:
        """Inside, list the files once, however often they are asked for: a store may take minutes for it."""
        self._remembered = {}
        try:
            yield
        finally:
            self._remembered = None

    def _listing(self) -> dict[str, tuple[int, str]]:
        """Return size and version of each file, sorted by name."""
        if self._remembered:
            return self._remembered
        listing = self._list()
        if self._remembered is not None:
            self._remembered = listing
        return listing

    def _list(self) -> dict[str, tuple[int, str]]:
        if self._only is not None:
            return {name: self._about(name) for name in self._only}
        if self._one_file():
            return {posixpath.basename(self.path): self._about(posixpath.basename(self.path))}
        if self.local:
            root = Path(self.path)
            found = {file.relative_to(root).as_posix(): _stated(file) for file in root.rglob("*") if file.is_file()}
        elif self.protocol in ("http", "https"):
            raise StreamError(
                f"{self.url()} cannot be listed: plain HTTP has no list of files. Name the files, as in "
                "path=['https://host/a.tar', 'https://host/b.tar'], or store an index beside them by `hocket data index`."
            )
        else:
            listed = self._asked(lambda: self._system().find(self._inside(self.path), detail=True), self.url())
            root_inside = self._inside(self.path) + "/"
            found = {
                name.removeprefix(root_inside): (int(about["size"]), _version(about))
                for name, about in listed.items()
                if name.startswith(root_inside)
            }
        if not found:
            raise MissingData(f"{self.url()} does not exist, or has no file. Check the path.")
        return {name: found[name] for name in sorted(found)}

    def has(self, name: str) -> bool:
        """Whether there is such a file; also where a store cannot list."""
        if self._only is not None and name not in self._only:
            return False
        if self.local:
            return self.local_path(name).is_file()
        try:
            return bool(self._info(self._full(name))["type"] == "file")
        except MissingData:
            return False

    def url(self, name: str = "") -> str:
        """Return the full URL of a file, or of the root, without secrets: for messages."""
        return str(masked(self._full(name)))

    def local_path(self, name: str) -> Path:
        """Return the path of a file on disk. Only for local files."""
        return Path(self._full(name))

    def read(self, name: str, start: int = 0, size: int | None = None, attempts: Attempts | None = None) -> bytes:
        """Return a file, or ``size`` bytes of it from byte ``start``, by one request. What may pass is tried again.

        Errors: `DamagedData` where the file has fewer bytes.
        """
        attempts = attempts or Attempts()
        url = self.url(name)

        def once() -> bytes:
            data = self._read_local(name, start, size) if self.local else self._read_remote(name, start, size)
            if size is not None and len(data) > size:  # a server that knows no ranges sends the whole file
                data = data[start : start + size]
            if size is not None and len(data) < size:
                raise _Short(f"{url} has {len(data):,} bytes from byte {start:,}, and not {size:,}")
            return data

        return self._asked(once, url, attempts)

    def write(self, name: str, data: bytes) -> None:
        """Write a file: whole, or not at all."""
        if self.local:
            try:
                self.local_path(name).parent.mkdir(parents=True, exist_ok=True)
                with replacing(self.local_path(name)) as file:
                    file.write(data)
            except OSError as error:
                raise StreamError(
                    f"{self.url(name)} cannot be written: {error}. Check the path, its rights and the disk."
                ) from error
        elif self.protocol in ("http", "https"):
            raise StreamError(
                f"{self.url(name)} cannot be written: plain HTTP has no writing. Write to a folder or to s3://…."
            )
        else:
            path = self._inside(self._full(name))
            self._asked(lambda: within(len(data), self._system(), "pipe_file", path, data), self.url(name))

    def _asked(self, ask: Callable[[], T], url: str, attempts: Attempts | None = None) -> T:
        """Return what a call returns, tried again while its error may pass."""
        attempts = attempts or Attempts()
        while True:
            try:
                return ask()
            except Exception as error:
                if isinstance(error, _Short):
                    if self.local or not attempts.again(most=3):
                        raise DamagedData(f"{error}. Write this file, or the index of the data, again.") from None
                elif final(error, url) or self.local or not attempts.again(error):
                    raise failed(error, url, attempts) from error

    def _read_local(self, name: str, start: int, size: int | None) -> bytes:
        with open(self.local_path(name), "rb") as file:
            file.seek(start)
            return file.read() if size is None else file.read(size)

    def _read_remote(self, name: str, start: int, size: int | None) -> bytes:
        if size == 0:
            return b""
        whole = start == 0 and size is None
        span = {} if whole else {"start": start, "end": None if size is None else start + size}
        path = self._inside(self._full(name))
        return bytes(within(size, self._system(), "cat_file", path, **span))

    def _system(self) -> Any:
        return client(self.path, self.storage_options)

    def _inside(self, url: str) -> str:
        """Return a path as the file system names it."""
        return str(self._system()._strip_protocol(url))

    def _full(self, name: str) -> str:
        if not name or (name == posixpath.basename(self.path) and self._one_file()):
            return self.path
        return posixpath.join(self.path, name)

    def _info(self, url: str) -> Mapping[str, Any]:
        return self._asked(lambda: self._system().info(self._inside(url)), str(masked(url)))

    def _about(self, name: str) -> tuple[int, str]:
        if self.local:
            try:
                return _stated(self.local_path(name))
            except OSError as error:
                raise failed(error, self.url(name), Attempts()) from error
        about = self._info(self._full(name))
        if about["size"] is None:
            raise StreamError(
                f"{self.url(name)} has no size: the server does not tell it. Use a server that sends Content-Length."
            )
        return int(about["size"]), _version(about)

    def _one_file(self) -> bool:
        if self._is_one_file is None:
            if self.local:
                self._is_one_file = os.path.isfile(self.path)
            elif self._folder_slash or (
                self.protocol in ("http", "https") and "." not in posixpath.basename(self.path)
            ):
                self._is_one_file = False
            else:
                try:
                    self._is_one_file = self._info(self.path)["type"] == "file"
                except MissingData:
                    self._is_one_file = False
        return self._is_one_file


def _stated(file: Path) -> tuple[int, str]:
    about = file.stat()
    return about.st_size, str(about.st_mtime_ns)


def _version(about: Mapping[str, Any]) -> str:
    """Return what a store says of the contents of a file, under the names that fsspec's file systems have for it."""
    return str(next((about[key] for key in _VERSIONS if about.get(key)), ""))


_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "generation",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
)


class _Short(OSError):
    """The store sent fewer bytes than were asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)

    def __str__(self) -> str:
        return str(self.strerror)
