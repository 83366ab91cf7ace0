"""Decompress chunks, by the names that MDS and litdata have for compressions."""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hocket.errors import Unsupported, WrongFile
from hocket.help import installing
from hocket_streaming.formats.common import missing


def _bounded(opened: Callable[[Any], Any]) -> Callable[[bytes, int], bytes]:
    def read(data: bytes, most: int) -> bytes:
        with opened(io.BytesIO(data)) as file:
            return bytes(file.read(most))

    return read


def _zstd(data: bytes, most: int) -> bytes:
    zstandard = _library("zstandard", installing.command("zstd", "hocket-streaming"), "zstd")
    if most >= 0:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
            return bytes(reader.read(most))
    frames = []
    while data:  # a stream would end without an error where the data do
        frame = zstandard.ZstdDecompressor().decompressobj()
        frames.append(frame.decompress(data))
        if not frame.eof:
            raise ValueError("it is truncated")
        data = frame.unused_data
    return b"".join(frames)


def _brotli(data: bytes, most: int) -> bytes:
    return bytes(_library("brotli", installing.library("brotli"), "br").decompress(data))


def _snappy(data: bytes, most: int) -> bytes:
    return bytes(_library("snappy", installing.library("python-snappy"), "snappy").decompress(data))


#: Functions of the compressed bytes and of the most bytes to return.
_ALGORITHMS: dict[str, Callable[[bytes, int], bytes]] = {
    "br": _brotli, "bz2": _bounded(bz2.open), "gz": _bounded(gzip.open), "snappy": _snappy, "zstd": _zstd,
}  # fmt: skip


def _library(module: str, command: str, algorithm: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(f"The compression '{algorithm}' needs {module}", command) from error


def check(algorithm: object) -> None:
    """Raise Unsupported unless a compression, such as ``"zstd"`` or ``"gz:9"``, is known."""
    if not isinstance(algorithm, str) or algorithm.partition(":")[0] not in _ALGORITHMS:
        raise Unsupported(
            f"The compression {algorithm!r} is not supported. Supported are {', '.join(_ALGORITHMS)}: write the data set again."
        )


def decompress(algorithm: str, data: bytes, size: int | None = None) -> bytes:
    """Return the bytes that were compressed.

    Args:
        algorithm: ``"zstd"``, ``"gz"``, ``"bz2"``, ``"br"`` or ``"snappy"``, with or without a level as in ``"zstd:3"``.
        data: the compressed bytes.
        size: how many bytes they are, if it is known.

    Raises:
        hocket.errors.Unsupported: an unknown compression.
        hocket.errors.MissingPackage: its library is not installed.
        hocket.errors.WrongFile: these are not bytes of this compression, or not ``size``.

    Example:
        >>> import gzip
        >>> from hocket_streaming.formats.compression import decompress
        >>> decompress("gz:9", gzip.compress(b"abc"), 3)
        b'abc'
    """
    check(algorithm)
    name = algorithm.partition(":")[0]
    try:
        # One byte more than there should be tells longer data, without decompressing all of them.
        raw = _ALGORITHMS[name](data, -1 if size is None else size + 1)
    except ImportError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise WrongFile(f"it cannot be decompressed as {name}: {error}") from error
    except Exception as error:  # the errors of brotli, snappy and zstandard have no base but Exception
        raise WrongFile(f"it cannot be decompressed as {name}: {type(error).__name__}: {error}") from error
    if size is not None and len(raw) != size:
        more = "more than " if len(raw) > size else ""
        raise WrongFile(f"{name} gives {more}{min(len(raw), size):,} bytes; the index says {size:,}")
    return raw
