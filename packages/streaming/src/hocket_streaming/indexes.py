"""The index that hocket keeps of a data set: its chunks with their samples and checksums, in ``hocket-index.json``.

It lies beside the data, where `hocket data index` writes it, or in a folder of the user's cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics import safe_files
from hocket.errors import WrongFile
from hocket.help import warn
from hocket.plugins import registry
from hocket_streaming.checksums import DEFAULT, matches, started
from hocket_streaming.formats.common import BLOCK, below, whole
from hocket_streaming.shards import INDEX, Chunk, Part, Shards
from hocket_streaming.store.folders import default_folder
from hocket_streaming.threads import in_threads

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

#: The version of the file, and most bytes of it that are read.
_VERSION, _BYTES = 1, 1 << 28


def indexed(shards: Shards, checksums: bool = False, cache: str | os.PathLike[str] | None = None) -> list[Chunk]:
    """Return the chunks of a data set: from a stored index if it still agrees with the files, else as the format lists them.

    A format without an index of its own (`Shards.indexed`) is read once, by one process of a machine, and the index is stored
    in a cache folder.

    Args:
        shards: the data set.
        checksums: whether every chunk has to have a checksum; the data are read once for those that have none.
        cache: the folder for indexes; None for one in the user's cache folder.

    Raises:
        OSError: the data cannot be read, or are damaged.

    Example:
        >>> import pathlib, tempfile
        >>> from hocket_streaming.formats import find
        >>> from hocket_streaming.indexes import indexed
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "notes.jsonl").write_text('{"note": "do"}\\n{"note": "re"}\\n')
        >>> [(chunk.samples, chunk.checksum) for chunk in indexed(find(Files(str(folder))), cache=folder / "cache")]
        [(2, 'xxh64:46dffbe255b9616e')]
    """
    if (chunks := _beside(shards)) is not None and _enough(chunks, checksums):
        return chunks
    if shards.indexed:
        chunks = list(shards.chunks())
        if _enough(chunks, checksums):
            return chunks
    folder = Path(cache) if cache is not None else default_folder("indexes")
    version = shards.files.version(shards.data_files())
    described = json.dumps([shards.files.url(), _format(shards), options(shards), version], sort_keys=True)
    file = folder / f"{hashlib.blake2b(described.encode(), digest_size=16).hexdigest()}.json"
    with _locked(file):
        with suppress(OSError, ValueError):
            chunks = loads(safe_files.content(file, _BYTES), shards)
            if _enough(chunks, checksums):
                return chunks
        chunks = build(shards)
        with suppress(OSError), safe_files.replacing(file) as written:
            written.write(dumps(shards, chunks))
    return chunks


def _enough(chunks: Sequence[Chunk], checksums: bool) -> bool:
    return not checksums or all(chunk.checksum for chunk in chunks)


def build(shards: Shards) -> list[Chunk]:
    """Return the chunks of a data set, all of them with checksums; the data are read for those that have none.

    Raises:
        OSError: the data cannot be read, or are damaged.
    """

    def summed(chunk: Chunk) -> Chunk:
        if chunk.checksum:
            return chunk
        computed = started()
        for part in chunk.parts:
            for at in range(0, part.size, BLOCK):
                computed.update(shards.files.read(part.file, part.start + at, min(BLOCK, part.size - at)))
        return dataclasses.replace(chunk, checksum=f"{DEFAULT}:{computed.hexdigest()}")

    return in_threads(summed, shards.chunks())


def store(shards: Shards, chunks: Sequence[Chunk]) -> str:
    """Write the index beside the data, and return its URL. Raises OSError where that is not possible."""
    shards.files.write(INDEX, dumps(shards, chunks))
    return shards.files.url(INDEX)


def options(shards: Shards) -> dict[str, Any]:
    """Return the options with which an object of a format was made."""
    return {name: getattr(shards, name) for name in inspect.signature(type(shards)).parameters if name != "files"}


def _format(shards: Shards) -> str:
    entry = registry.entry_of("shards", type(shards))
    return entry.name if entry is not None else f"{type(shards).__module__}:{type(shards).__qualname__}"


def dumps(shards: Shards, chunks: Sequence[Chunk]) -> bytes:
    """Return an index as JSON: files, and chunks as ``[samples, checksum, stored, extra, part, …]`` that refer to them."""
    try:
        files = shards.data_files()
    except OSError:  # a store that cannot list
        files = {}
    listing = dict(files)
    for part in (part for chunk in chunks for part in chunk.parts):
        if part.file not in files:
            listing[part.file] = max(listing.get(part.file, 0), part.start + part.size)
    numbers = {name: number for number, name in enumerate(listing)}
    extras: dict[str, int] = {}
    rows: list[list[Any]] = []
    for chunk in chunks:
        extra = extras.setdefault(json.dumps(chunk.extra), len(extras))
        parts = [
            numbers[part.file] if part.size == listing[part.file] else [numbers[part.file], part.start, part.size]
            for part in chunk.parts
        ]
        rows.append([chunk.samples, chunk.checksum, chunk.stored, extra, *parts])
    content = {
        "hocket": _VERSION,
        "format": _format(shards),
        "options": options(shards),
        "files": list(map(list, listing.items())),
        "extras": list(map(json.loads, extras)),
        "chunks": rows,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def loads(data: bytes, shards: Shards) -> list[Chunk]:
    """Return the chunks of an index.

    Raises:
        hocket.errors.WrongFile: it is damaged, or is of another format, other options or other files.
    """
    content = _parsed(data, shards.files)
    about = f"the index of {shards.files.url()}"
    if content["format"] != _format(shards) or content["options"] != json.loads(json.dumps(options(shards))):
        raise WrongFile(f"{about} is of the format {content['format']} with the options {content['options']}")
    try:
        files = [
            (below(name, shards.files), whole(size, "the size of a file", shards.files))
            for name, size in content["files"]
        ]
        try:
            there: dict[str, int] | None = shards.data_files()
        except OSError:  # a store that cannot list; sizes are checked when chunks are fetched
            there = None
        if there is not None and there != dict(files):
            changed = sorted(name for name, _ in {*there.items()} ^ {*files})
            raise WrongFile(f"{about} does not agree with {len(changed):,} of its files, such as {changed[0]}")
        extras, chunks = content["extras"], []
        for samples, checksum, stored, extra, *parts in content["chunks"]:
            matches(b"", checksum)  # an unknown algorithm is an error here, and not at the first chunk
            chunks.append(
                Chunk(
                    tuple(_part(part, files, shards.files) for part in parts),
                    whole(samples, "samples of a chunk", shards.files, 1),
                    str(checksum),
                    whole(stored, "stored bytes of a chunk", shards.files),
                    extras[whole(extra, "a reference", shards.files)],
                )
            )
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise WrongFile(f"{about} is damaged: {type(error).__name__}: {error}") from error
    return chunks


def _part(part: Any, files: list[tuple[str, int]], of: Files) -> Part:
    if not isinstance(part, list):
        return Part(*files[whole(part, "a reference", of)])
    number, start, size = (whole(value, "a range of bytes", of) for value in part)
    if start + size > files[number][1]:
        raise ValueError(f"a range of bytes ends beyond {files[number][0]}")
    return Part(files[number][0], size, start)


def _parsed(data: bytes, files: Files) -> dict[str, Any]:
    try:
        content = safe_files.parsed(data)
        if not isinstance(content, dict) or content["hocket"] != _VERSION or not isinstance(content["format"], str):
            raise ValueError("it is not of this version of hocket")
        if not content.keys() >= {"options", "files", "extras", "chunks"} or not isinstance(content["options"], dict):
            raise ValueError("it lacks a part")
    except (ValueError, KeyError, RecursionError) as error:
        raise WrongFile(
            f"{files.url(INDEX)} cannot be read: {error}. Write it again by `hocket data index`."
        ) from error
    return content


def described(files: Files) -> tuple[str, dict[str, Any]]:
    """Return the name of the format, and its options, of the index beside the data."""
    content = _parsed(files.read(INDEX), files)
    return content["format"], dict(content["options"])


def _beside(shards: Shards) -> list[Chunk] | None:
    """Return the index beside the data, or None if there is none that agrees with them."""
    if not shards.files.has(INDEX):
        return None
    try:
        return loads(shards.files.read(INDEX), shards)
    except WrongFile as error:
        warn(f"{shards.files.url(INDEX)} is not used: {error}. Write it again by `hocket data index`.")
        return None


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock of the kernel, so that one process of a machine builds an index while the others wait for it."""
    try:
        import fcntl

        file.parent.mkdir(parents=True, exist_ok=True)
        opened = open(file.with_suffix(".lock"), "ab")  # noqa: SIM115
    except (ImportError, OSError):  # Windows, or a folder that cannot be written: every process builds it
        yield
        return
    with opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
