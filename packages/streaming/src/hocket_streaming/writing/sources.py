"""Sources of samples: parts that are read independently, in any process, with the same samples in the same order.

A source is a function that yields samples, tables of CSV, or a data set of a format that `hocket_streaming.formats` reads.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hocket.errors import Mistake, WrongFile, WrongState, WrongType, WrongValue
from hocket_streaming.formats.common import pyarrow

if TYPE_CHECKING:
    from hocket_streaming.formats.lines import Text
    from hocket_streaming.shards import Shards
    from hocket_streaming.store.files import Files

T = TypeVar("T")
#: Bytes of a part of a source of files, about.
PART = 1 << 26
_BLOCK = 1 << 22
#: Parts of a function, unless it is said: not the number of CPUs, because the order of samples depends on it.
_PARTS = 64


class Source:
    """The base of sources; objects are pickled into processes.

    Attributes:
        parts: how many parts there are.
        identity: what tells this source from another one: plain data that JSON can hold.
    """

    parts: int = 1
    identity: Any = None

    def read(self, part: int) -> Iterator[Any]:
        """Yield the samples of a part."""
        raise NotImplementedError


def _times(files: Files, names: Iterable[str]) -> list[int]:
    """Return when files were changed; of stores, only names and sizes are known."""
    return [files.local_path(name).stat().st_mtime_ns for name in names] if files.local else []


class Called(Source):
    """The samples that a function yields, named as ``module:function``.

    A function with the arguments ``part`` and ``parts`` yields the samples of one part, and parts are computed in parallel.
    """

    def __init__(self, name: str, parts: int = 0) -> None:
        self._name = name
        wanted = set(inspect.signature(self._function()).parameters) >= {"part", "parts"}
        if parts > 1 and not wanted:
            raise WrongValue(
                f"parts={parts} needs a function that yields one part, and {name} has no arguments part and parts. "
                "Write def samples(part, parts), which yields every sample in one of the parts."
            )
        self._parted = wanted
        self.parts = parts or (_PARTS if wanted else 1)
        code = getattr(inspect.unwrap(self._function()), "__code__", None)
        files = {sys.modules[name.partition(":")[0]].__file__ or "", code.co_filename if code else ""}
        contents = [Path(file).read_bytes() for file in sorted(files) if os.path.isfile(file)]
        self.identity = [name, self.parts, [hashlib.sha256(each).hexdigest() for each in contents]]

    def _function(self) -> Any:
        module, _, function = self._name.partition(":")
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does, in worker processes too
        try:
            found = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            if error.name and (module + ".").startswith(error.name + "."):
                raise WrongValue(
                    f"There is no module {error.name!r} for {self._name!r}. Write module:function."
                ) from None
            raise
        except AttributeError:
            raise WrongValue(f"The module {module!r} has no {function!r}. Write module:function.") from None
        if not callable(found):
            raise WrongType(f"{self._name} is a {type(found).__name__} and not a function that yields samples.")
        return found

    def read(self, part: int) -> Iterator[Any]:
        function = self._function()
        try:
            yield from function(part=part, parts=self.parts) if self._parted else function()
        except Exception as error:
            if isinstance(error, Mistake):
                raise
            code = getattr(inspect.unwrap(function), "__code__", None)
            file, line = (code.co_filename, code.co_firstlineno) if code else (self._name, 0)
            for frame in traceback.extract_tb(error.__traceback__):
                line = frame.lineno if frame.filename == file and frame.lineno else line
            raise WrongState(
                f"The source {self._name} failed in {file}, line {line}: {type(error).__name__}: {error}. "
                "It should yield samples."
            ) from error


class Tables(Source):
    """Files of CSV, with names of columns in the first line; pyarrow finds the types of columns in the first block."""

    def __init__(self, files: Files, names: Mapping[str, int]) -> None:
        self._files, self._names = files, list(names)
        self.parts = len(self._names)
        self.identity = [files.path, dict(names), _times(files, names)]

    def read(self, part: int) -> Iterator[Any]:
        pyarrow("CSV")
        from pyarrow import csv

        name = self._names[part]
        try:
            for batch in csv.open_csv(io.BufferedReader(_Opened(self._files, name), _BLOCK)):
                yield from batch.to_pylist()
        except ValueError as error:  # of pyarrow
            raise WrongFile(f"{self._files.url(name)} cannot be read as CSV: {error}") from None


class _Opened(io.RawIOBase):
    def __init__(self, files: Files, name: str) -> None:
        self._files, self._name, self._at, self._size = files, name, 0, files.names()[name]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        buffer[:size] = self._files.read(self._name, self._at, size) if size else b""
        self._at += size
        return size


def _grouped(sizes: Iterable[tuple[T, int]], limit: int) -> list[list[T]]:
    groups: list[list[T]] = []
    full = limit
    for each, size in sizes:
        if full >= limit:
            groups.append([])
            full = 0
        groups[-1].append(each)
        full += size
    return groups


class Documents(Source):
    """Files of text, of which every one is a sample; a part is some of them."""

    def __init__(self, shards: Text) -> None:
        self._shards, names = shards, shards.data_files()
        self._parts = _grouped(names.items(), PART)
        self.parts = len(self._parts)
        self.identity = ["documents", shards.files.path, names, _times(shards.files, names)]

    def read(self, part: int) -> Iterator[Any]:
        yield from map(self._shards.document, self._parts[part])


class Read(Source):
    """A data set of a format that hocket reads; a part is some of its chunks."""

    def __init__(self, shards: Shards, size: int = PART) -> None:
        from hocket_streaming.indexes import indexed

        self._shards = shards
        self._parts = _grouped(((chunk, chunk.size) for chunk in indexed(shards)), size)
        self.parts = len(self._parts)
        chunks = [chunk for part in self._parts for chunk in part]
        names = dict.fromkeys(part.file for chunk in chunks for part in chunk.parts)
        self.identity = [shards.files.path, [chunk.identity() for chunk in chunks], _times(shards.files, names)]

    def read(self, part: int) -> Iterator[Any]:
        from hocket_streaming.writing.chunk_reading import opened

        for chunk in self._parts[part]:
            content = opened(self._shards, chunk)
            for row in range(chunk.samples):
                yield self._shards.get(content, row)


def find(
    source: str,
    format: str = "",
    parts: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    documents: bool = False,
) -> Source:
    """Return the source of this name: ``module:function``, a folder, a file, or a URL.

    Args:
        format: of a data set, where several would serve.
        parts: of a function.
        storage_options: of fsspec.
        options: of the format.
        documents: whether a file of text is one sample, and not its lines.
    """
    module, _, function = source.partition(":")
    if module.endswith(".py") and not format:
        name = function or "samples"
        raise WrongValue(f"{source!r} is a file of Python. Name a function of it: '{Path(module).stem}:{name}'.")
    if (
        function.isidentifier()
        and all(each.isidentifier() for each in module.split("."))
        and not os.path.exists(source)
    ):
        return Called(source, parts)
    from hocket_streaming import formats
    from hocket_streaming.formats.lines import Text
    from hocket_streaming.store.files import Files

    files = Files(source, dict(storage_options) if storage_options else None)
    if not format and (source.endswith(".csv") or "://" not in source):
        names = files.listed()
        if names and all(name.endswith(".csv") for name in names):
            return Tables(files, names)
    shards = formats.find(files, format or None, **(options or {}))
    return Documents(shards) if documents and isinstance(shards, Text) else Read(shards)
