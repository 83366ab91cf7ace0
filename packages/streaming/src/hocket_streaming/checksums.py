"""Checksums of chunks, written as ``"algorithm:hexadecimal"``: those of hashlib and of xxHash."""

from __future__ import annotations

import hashlib
from typing import Any

import xxhash

from hocket.errors import WrongValue

#: The algorithm of the indexes that hocket writes.
DEFAULT = "xxh64"
#: Algorithms that read as fast as memory, before slower ones.
_FASTEST = ("xxh3_128", "xxh128", "xxh3_64", "xxh64", "sha256", "sha1", "md5", "xxh32")
_XXHASH = {name: getattr(xxhash, name) for name in ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")}


def known(algorithm: str) -> bool:
    """Whether checksums of this algorithm can be computed here."""
    return algorithm in _XXHASH or (algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"))


def started(algorithm: str = DEFAULT) -> Any:
    """Return an object with ``update`` and ``hexdigest``, as those of hashlib.

    Raises:
        hocket.errors.WrongValue: the algorithm is unknown.
    """
    if not known(algorithm):
        raise WrongValue(
            f"'{algorithm}' is not a checksum that is known here. Known are {', '.join(_XXHASH)} and those of hashlib."
        )
    return _XXHASH[algorithm]() if algorithm in _XXHASH else hashlib.new(algorithm, usedforsecurity=False)


def checksum(data: bytes | memoryview, algorithm: str = DEFAULT) -> str:
    """Return the checksum of bytes, with its algorithm.

    Example:
        >>> from hocket_streaming.checksums import checksum
        >>> checksum(b"abc", "md5")
        'md5:900150983cd24fb0d6963f7d28e17f72'
    """
    computed = started(algorithm)
    computed.update(data)
    return f"{algorithm}:{computed.hexdigest()}"


def matches(data: bytes | memoryview, expected: str) -> bool:
    """Whether bytes have this checksum; also where none is expected (``""``)."""
    algorithm, _, digest = expected.partition(":")
    return not expected or checksum(data, algorithm).partition(":")[2] == digest.lower()


def chosen(hashes: dict[str, str]) -> str:
    """Return the fastest of the checksums of an index, by their algorithms; "" where none is known here."""
    ordered = sorted(filter(known, hashes), key=lambda name: (*_FASTEST, name).index(name))
    return f"{ordered[0]}:{hashes[ordered[0]]}" if ordered else ""
