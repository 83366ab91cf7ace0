"""What a format of a data set in chunks is: `Shards`, which lists chunks, opens one, and gets samples of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.errors import WrongFile
from hocket_streaming.threads import in_threads

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

#: The file beside the data in which hocket keeps an index, and files that are no data.
INDEX = "hocket-index.json"
_HIDDEN = re.compile(rf"(^|/)(\.|{re.escape(INDEX)}$)")


@dataclass(frozen=True, slots=True)
class Part:
    """A range of bytes of one file.

    Args:
        file: its path below the root of the data set, such as ``"train/shard.00001.mds"``.
        size: bytes of the range.
        start: the first byte.
    """

    file: str
    size: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is fetched, checked, cached and opened as one: some samples that lie together.

    Args:
        parts: where its bytes are; joined in this order.
        samples: how many samples it has.
        checksum: of the joined bytes as they are fetched, as ``"xxh64:…"`` or ``"sha256:…"``, in hexadecimal; "" for none.
        stored: bytes that `Shards.unpack` makes of it, an estimate where they are not known before; 0 where `unpack` returns
            the bytes that were fetched.
        extra: what else the format needs to open it: plain data that JSON can hold.
    """

    parts: tuple[Part, ...]
    samples: int
    checksum: str = ""
    stored: int = 0
    extra: Any = None

    @property
    def size(self) -> int:
        """Bytes that are fetched."""
        return sum(part.size for part in self.parts)

    @property
    def kept(self) -> int:
        """Bytes that it takes in the cache."""
        return self.stored or self.size

    def identity(self) -> str:
        """Return a digest of all that tells it from another chunk."""
        ranges = [(part.file, part.start, part.size) for part in self.parts]
        text = json.dumps([ranges, self.samples, self.checksum, self.stored, self.extra], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class Shards:
    """The base of formats, which are plug-ins of the entry-point group ``hocket.v1.shards``; an object is for one data set.

    Args:
        files: the files of the data set.

    Options of a format are further arguments of its constructor, by keyword, plain data, and attributes of the same names.
    Objects are pickled into worker processes and must hold no open file.
    """

    #: Whether `chunks` reads an index that the data set has. Otherwise it reads the data, and the result is kept as an index.
    indexed: ClassVar[bool] = True
    #: How the names of files with samples end, such as ``(".tar",)``; empty for every file.
    suffixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, files: Files) -> None:
        self.files = files

    def data_files(self) -> dict[str, int]:
        """Return the files with samples, by path, with their bytes, sorted. Hidden files and hocket's index are left out."""
        return {
            name: size
            for name, size in sorted(self.files.names().items())
            if name.endswith(self.suffixes or ("",)) and not _HIDDEN.search(name)
        }

    @classmethod
    def serves(cls, files: Files) -> bool:
        """Whether these files are of this format: unless overridden, whether one has a name that ends so.

        It looks at names and at small files alone.
        """
        return bool(cls.suffixes) and any(name.endswith(cls.suffixes) for name in files.listed())

    def chunks(self) -> Sequence[Chunk]:
        """Return the chunks in their order, the same in every process: unless overridden, those of all files."""
        files = self.data_files()
        if not files:
            raise WrongFile(
                f"{self.files.url()} has no file that ends in {' or '.join(self.suffixes)}. Name the folder that has them."
            )
        return [chunk for chunks in in_threads(lambda item: self.chunks_of(*item), files.items()) for chunk in chunks]

    def chunks_of(self, name: str, size: int) -> Sequence[Chunk]:
        """Return the chunks of a file of ``size`` bytes in their order; several files are read at the same time, in threads."""
        raise NotImplementedError

    def unpack(self, chunk: Chunk, fetched: bytes) -> bytes:
        """Return what the cache keeps of a chunk that was fetched: decompressed, or in a form that is opened faster."""
        return fetched

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return a chunk in a form that `get` reads. ``data`` is what `unpack` returned, mapped read-only."""
        raise NotImplementedError

    def get(self, opened: Any, row: int) -> Any:
        """Return a sample of an opened chunk, by its number in the chunk, from 0. It must not keep views of the data."""
        raise NotImplementedError
