"""A data set in chunks as torch wants it: samples by number, read by any process."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hocket.basics import launch_environment
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket_streaming import formats, indexes
from hocket_streaming.errors import DamagedData, StreamError
from hocket_streaming.shards import Shards
from hocket_streaming.sizes import shown, size_of
from hocket_streaming.store.ahead import Ahead
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.counters import Counters
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files
from hocket_streaming.store.folders import default_folder

_EXAMPLES = {"options": "{'length': 2048}", "storage_options": "{'anon': True}"}
#: What may be done with a chunk that cannot be read.
ON_ERROR = ("raise", "skip")


class StreamDataset(Dataset[Any]):
    """Samples of a data set in chunks, by their number; a map-style data set for any DataLoader.

    Worker processes, started by fork or by spawn, share a folder of chunks with all other processes of the machine. Chunks that
    lie on this machine's disk are mapped where they are.

    Args:
        path: a folder or a file, as a path or a URL that fsspec knows, such as ``"s3://bucket/mds"``.
        format: a format, by its name such as ``"mds"``, or its class; None to find it out.
        transform: called with a sample; what it returns is the sample.
        cache: a folder for chunks; None for the user's.
        cache_limit: the most bytes of that folder, as a number or as ``"20GB"``.
        on_error: ``"raise"``, or ``"skip"`` to leave out samples of chunks that cannot be read, with a warning for each chunk.
        keep: how many chunks a process keeps open.
        storage_options: what the file system of fsspec is made with, such as an endpoint.
        options: of the format, such as ``{"length": 2048, "dtype": "uint16"}``.

    Raises:
        StreamError: nothing can be read at the path.
        ValueError: an argument is not possible.

    Example:
        >>> import numpy, tempfile
        >>> from hocket_streaming import StreamDataset
        >>> path = tempfile.mkdtemp() + "/tokens.npy"
        >>> numpy.save(path, numpy.arange(12).reshape(6, 2))
        >>> dataset = StreamDataset(path)
        >>> len(dataset), dataset[5].tolist()
        (6, [10, 11])
    """

    def __init__(
        self,
        path: str,
        *,
        format: str | type[Shards] | None = None,
        transform: Callable[[Any], Any] | None = None,
        cache: str | None = None,
        cache_limit: int | str = "20GB",
        on_error: str = "raise",
        keep: int = 256,
        storage_options: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if on_error not in ON_ERROR:
            raise WrongValue(f"«on_error={on_error!r}» is not possible. Write one of {', '.join(map(repr, ON_ERROR))}.")
        for name, value in {"options": options, "storage_options": storage_options}.items():
            if not isinstance(value, Mapping | None):
                raise WrongType(f"«{name}={value!r}» is not a dict. Write such as {name}={_EXAMPLES[name]}.")
        if transform is not None and not callable(transform):
            raise WrongType(
                f"«transform={transform!r}» cannot be called. Give a function of a sample, such as transform=decode."
            )
        self.files = Files(path, storage_options)
        with self.files.listed_once():
            self.shards = formats.find(self.files, format, **(options or {}))
            chunks = indexes.indexed(self.shards)
            version = "" if all(chunk.checksum for chunk in chunks) else self._version()
        self.transform, self.on_error = transform, on_error
        self.cache = Cache(default_folder("chunks") if cache is None else cache, size_of(str(cache_limit)))
        self.counters = Counters()
        #: Samples of each chunk.
        self.sizes = [chunk.samples for chunk in chunks]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)]).tolist()
        #: A digest of the chunks, wherever they are.
        self.identity = hashlib.blake2b(
            "".join(chunk.identity() for chunk in chunks).encode(), digest_size=8
        ).hexdigest()
        self.chunks = Chunks(self.shards, chunks, self.cache, keep, self.counters, version)
        self._skipped: set[int] = set()
        self._ahead: Ahead | None = None

    def _version(self) -> str:
        """Return what tells files from their earlier contents, where no checksum does; "" where a store cannot list them."""
        try:
            return self.files.version(self.shards.data_files())
        except StreamError:
            return ""

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._transformed(self._sample(index % len(self)), index % len(self))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.fetch(indices)
        return _some(self.read(indices), indices, self.files)

    def fetch(self, indices: Sequence[int]) -> None:
        """Fetch the chunks of these samples that are not here, several at a time."""
        numbers = dict.fromkeys(bisect_right(self._starts, index) - 1 for index in indices)
        if self.on_error == "raise":
            return self.chunks.open_all(numbers)
        errors: dict[int, StreamError] = {}
        self.chunks.open_all((number for number in numbers if number not in self._skipped), errors)
        for number, error in errors.items():
            self._skip(number, error)

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Return samples by their numbers; ``on_error="skip"`` leaves out what cannot be read."""
        load = self._sample if self.on_error == "raise" else self._sample_or_skip
        samples = ((index, load(index)) for index in indices)
        return [self._transformed(sample, index) for index, sample in samples if sample is not _SKIPPED]

    def _transformed(self, sample: Any, index: int) -> Any:
        if self.transform is None:
            return sample
        try:
            return self.transform(sample)
        except Exception as error:
            error.add_note(f"transform= raised this for sample {index} of {self.files.url()}.")
            raise

    def _sample(self, index: int) -> Any:
        chunk = bisect_right(self._starts, index) - 1
        return self._decoded(self.chunks.open(chunk), chunk, index)

    def _decoded(self, opened: Any, chunk: int, index: int) -> Any:
        row = index - self._starts[chunk]
        try:
            return self.shards.get(opened, row)
        except StreamError:
            raise
        except Exception as error:
            where = self.files.url(self.chunks.chunks[chunk].parts[0].file)
            raise DamagedData(
                f"Sample {index}, number {row} of chunk {chunk} in {where}, cannot be decoded: {type(error).__name__}: {error}."
                " Write this file again, or leave such samples out by «on_error='skip'»."
            ) from error

    def _sample_or_skip(self, index: int) -> Any:
        chunk = bisect_right(self._starts, index) - 1
        if chunk in self._skipped:
            return _SKIPPED
        try:
            opened = self.chunks.open(chunk)
        except StreamError as error:
            self._skip(chunk, error)
            return _SKIPPED
        try:
            return self._decoded(opened, chunk, index)
        except StreamError as error:
            warn(f"Sample {index} is left out: {error}")
            return _SKIPPED

    def _skip(self, chunk: int, error: StreamError) -> None:
        self._skipped.add(chunk)
        self.counters.add(skipped=1)
        warn(f"The samples of chunk {chunk}, {self.sizes[chunk]} of {len(self)}, are left out: {error}")

    def ahead(self, chunks: Sequence[int], at_once: int) -> None:
        """Fetch these chunks in a process of its own, in this order, instead of those asked for before.

        Warns once if the cache has no room for the ``at_once`` chunks that the ranks of this machine read from at a time.
        """
        if self._ahead is None:
            self._warn_of_small_cache(at_once)
            here = launch_environment.current()
            ranks = (here and here.local_world_size) or 1
            self._ahead = Ahead(self.chunks, self.cache.limit // 2 // ranks)
        self._ahead.want(chunks)
        self.chunks.read_ahead(chunks)

    def _warn_of_small_cache(self, at_once: int) -> None:
        limit, largest = self.cache.limit, max(chunk.kept for chunk in self.chunks.chunks)
        needed = 2 * min(at_once, len(self.sizes)) * largest
        if limit < needed and not all(map(self.chunks.in_place, range(len(self.sizes)))):
            warn(
                f"«cache_limit={shown(limit)!r}» is less than this machine reads from at a time, so it fetches chunks again "
                f"and again. Give {shown(needed)} or more: 2 × {at_once} chunks (lanes × window) of up to {shown(largest)}. "
                "Or write a smaller lanes= or window=."
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ahead": None}


class Together(Dataset[Any]):
    """Several data sets as one, whose samples are numbered through; unlike torch's ConcatDataset, it loads them in batches."""

    def __init__(self, datasets: Sequence[StreamDataset]) -> None:
        self.datasets = list(datasets)
        self._starts = np.concatenate([[0], np.cumsum([len(each) for each in datasets])]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        which = bisect_right(self._starts, index) - 1
        return self.datasets[which][index - self._starts[which]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        pairs = [(which := bisect_right(self._starts, index) - 1, index - self._starts[which]) for index in indices]
        for number, dataset in enumerate(self.datasets):
            dataset.fetch([index for which, index in pairs if which == number])
        samples = [sample for which, index in pairs for sample in self.datasets[which].read([index])]
        return _some(samples, indices, self.datasets[0].files)


_SKIPPED = object()


def _some(samples: list[Any], indices: Sequence[int], files: Files) -> list[Any]:
    """Return the samples of a batch, unless all of them were left out."""
    if indices and not samples:
        raise StreamError(
            f"All {len(indices)} samples of a batch are in chunks that cannot be read, so «on_error='skip'» leaves nothing of "
            f"it. Repair {files.url()}; «hocket data check» names its damaged chunks."
        )
    return samples
