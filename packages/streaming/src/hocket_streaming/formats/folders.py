"""Files in folders: the folder's name is the class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongFile
from hocket_streaming.formats.common import damaged, extensions_of, of_extensions, positive
from hocket_streaming.shards import Chunk, Part, Shards

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

#: Files of other formats, which are not taken for samples.
_OTHERS = (
    ".mds", ".bin", ".npy", ".npz", ".safetensors", ".parquet", ".arrow", ".feather", ".tar", ".jsonl", ".ndjson", ".gz",
    ".zst",
)  # fmt: skip


class Folders(Shards):
    """Read a folder of folders of files: a sample is a dict of the bytes, the path and the number of the class.

    The class is the first folder of a path; classes are numbered in the order of their names. Files beside these folders are
    not read. A chunk has about ``chunk_files`` files, each fetched by itself: for more than some 100,000 files, ``hocket data
    convert`` makes shards that are read faster.

    Args:
        files: the files of the data set.
        extensions: how names of files end, such as ``["jpg", "png"]``; None for all.
        chunk_files: most files of a chunk.
        chunk_bytes: most bytes of a chunk, if it has several files.

    Example:
        >>> import pathlib, tempfile
        >>> from hocket_streaming.formats.folders import Folders
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (folder / name).mkdir()
        ...     _ = (folder / name / "1.jpg").write_bytes(name.encode())
        >>> shards = Folders(Files(str(folder)))
        >>> (chunk,) = shards.chunks()
        >>> shards.get(shards.open(chunk, memoryview(b"catdog")), 1)
        {'bytes': b'dog', 'path': 'dog/1.jpg', 'class': 1}
    """

    def __init__(
        self,
        files: Files,
        *,
        extensions: Sequence[str] | None = None,
        chunk_files: int = 64,
        chunk_bytes: int = 1 << 22,
    ) -> None:
        super().__init__(files)
        self.extensions = extensions_of(extensions)
        self.chunk_files = positive("chunk_files", chunk_files)
        self.chunk_bytes = positive("chunk_bytes", chunk_bytes)

    @classmethod
    def serves(cls, files: Files) -> bool:
        """Whether there are folders of files, and none of them is of another format."""
        names = files.listed()
        return any("/" in name for name in names) and not any(
            name.lower().endswith(_OTHERS) or name == "index.json" for name in names
        )

    def data_files(self) -> dict[str, int]:
        """Return the files in folders, with one of the extensions."""
        names = of_extensions(super().data_files(), self.extensions)
        return {name: size for name, size in names.items() if "/" in name}

    def chunks(self) -> list[Chunk]:
        """Return the files in groups, in the order of their paths."""
        files = self.data_files()
        if not files:
            ending = "" if self.extensions is None else f" that end in {', '.join(self.extensions)}"
            raise WrongFile(f"{self.files.url()} has no folders of files{ending}. Name the folder that has them.")
        classes = {name: number for number, name in enumerate(sorted({name.partition("/")[0] for name in files}))}
        groups: list[list[Part]] = [[]]
        size = 0
        for name, length in files.items():
            if groups[-1] and (len(groups[-1]) == self.chunk_files or size + length > self.chunk_bytes):
                groups.append([])
                size = 0
            groups[-1].append(Part(name, length))
            size += length
        return [
            Chunk(tuple(group), len(group), extra=[classes[part.file.partition("/")[0]] for part in group])
            for group in groups
        ]

    def open(self, chunk: Chunk, data: memoryview) -> Any:
        """Return the bytes, and where each file begins."""
        if len(data) != chunk.size:
            raise damaged(self, chunk, f"its files have {len(data):,} bytes, not {chunk.size:,}")
        starts = [0]
        for part in chunk.parts:
            starts.append(starts[-1] + part.size)
        return data, starts, chunk

    def get(self, opened: Any, row: int) -> dict[str, Any]:
        """Return a file: ``bytes``, ``path`` below the root, and ``class``."""
        data, starts, chunk = opened
        return {
            "bytes": bytes(data[starts[row] : starts[row + 1]]),
            "path": chunk.parts[row].file,
            "class": chunk.extra[row],
        }
