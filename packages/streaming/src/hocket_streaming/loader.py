"""What users write: `stream`, a DataLoader over a data set in chunks."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from hocket.data import SeededDataset
from hocket.errors import WrongType, WrongValue
from hocket_streaming.dataset import StreamDataset, Together
from hocket_streaming.foreign import check_whole, path_of
from hocket_streaming.order.sampler import GlobalOrder
from hocket_streaming.shards import Shards

#: Arguments of a loader that the order of a stream decides.
_DECIDED = ("sampler", "batch_sampler", "dataset")


class StreamLoader(DataLoader[Any]):
    """A DataLoader over streams; see `stream`. Its ``batch_sampler`` is a `GlobalOrder`, its ``dataset`` a `StreamDataset`.

    Example:
        >>> import numpy, tempfile
        >>> from hocket_streaming import StreamLoader, stream
        >>> numpy.save(path := tempfile.mkdtemp() + "/x.npy", numpy.zeros((6, 2)))
        >>> isinstance(stream(path), StreamLoader)
        True
    """

    def __init__(
        self, datasets: Sequence[StreamDataset], order: GlobalOrder, seed: int | None = None, **loader: Any
    ) -> None:
        for name in _DECIDED:
            if name in loader:
                raise WrongType(
                    f"A stream has its own order, so «{name}=» has no meaning. Omit it, and write shuffle=, lanes= or window=."
                )
        known = [name for name in inspect.signature(DataLoader).parameters if name not in _DECIDED]
        for name in loader:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]}=?" if near else ""
                raise WrongType(f"There is no argument «{name}=».{hint} Of a DataLoader there are {', '.join(known)}.")
        if loader.get("num_workers"):
            loader = {"persistent_workers": True} | loader
        dataset: Dataset[Any] = datasets[0] if len(datasets) == 1 else Together(datasets)
        super().__init__(dataset if seed is None else SeededDataset(dataset, seed), batch_sampler=order, **loader)
        self.streams = list(datasets)

    def __iter__(self) -> Any:
        """Begin an epoch. Before worker processes start, the first chunks are fetched; a Trainer has an order of its own."""
        if self._iterator is None and isinstance(self.batch_sampler, GlobalOrder):
            next(self.batch_sampler.after(0)[0], None)
        return super().__iter__()


def stream(
    path: Any,
    *,
    format: str | type[Shards] | None = None,
    transform: Callable[[Any], Any] | None = None,
    seeded: bool = False,
    batch_size: int = 1,
    shuffle: bool = True,
    seed: int | None = None,
    lanes: int | None = None,
    window: int = 4,
    drop_last: bool = False,
    epoch_size: int | None = None,
    cache: str | None = None,
    cache_limit: int | str = "20GB",
    on_error: str = "raise",
    storage_options: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **loader: Any,
) -> StreamLoader:
    """Return a loader over a data set in chunks, in an object store or on disk.

    Its global batches are the same on any number of ranks and workers, and a run is resumed from any step at once. Pass it as
    ``train_data=`` or ``eval_data=`` of a Trainer, or iterate it in a loop of your own.

    Args:
        path: a folder or a file, as a path or a URL that fsspec knows, such as ``"s3://bucket/mds"``; or a StreamingDataset of
            litdata or mosaicml-streaming, of which the path is taken and nothing else.
        format: a format, by its name such as ``"mds"``, or its class; None to find it out.
        transform: called with a sample, in the process that loads it; what it returns is the sample.
        seeded: whether each sample has random numbers of its own while ``transform`` is called, as by `hocket.data.seeded`.
            With random augmentation in worker processes, exact resume needs it.
        batch_size: samples in a batch of one rank; ``Trainer(global_batch=)`` sets that of all ranks together.
        shuffle: False for the order of the data, as evaluations want it.
        seed: of the order; None for the seed of the run.
        lanes: at most so many stretches of the data are read beside each other; None for 16, or a lane for 64 samples of a
            global batch where these are more. With as many lanes as machines or more, each machine fetches its own part.
        window: chunks of a lane whose samples are shuffled among each other.
        drop_last: whether an epoch ends before a batch of fewer samples.
        epoch_size: samples in an epoch; the next one goes on where it ended. None for all samples.
        cache: a folder for chunks, shared by all processes of a machine; None for that of the user.
        cache_limit: the most bytes of that folder, as a number or as ``"20GB"``.
        on_error: ``"raise"``, or ``"skip"`` to leave out samples of chunks that cannot be read, with a warning for each chunk.
        storage_options: what the file system of fsspec is made with, such as an endpoint.
        options: of the format, such as ``{"length": 2048, "dtype": "uint16"}``.
        loader: arguments of torch's DataLoader, such as ``num_workers`` and ``collate_fn``.

    Raises:
        StreamError: nothing can be read at the path.
        ValueError: an argument is not possible.
        TypeError: an argument of the loader that the order decides, such as ``sampler``.

    Example:
        >>> import numpy, tempfile
        >>> import hocket_streaming
        >>> numpy.save(path := tempfile.mkdtemp() + "/x.npy", numpy.arange(12).reshape(6, 2))
        >>> loader = hocket_streaming.stream(path, batch_size=3, seed=17)
        >>> [batch.shape for batch in loader]
        [torch.Size([3, 2]), torch.Size([3, 2])]
    """
    given, path = path, path if isinstance(path, str | os.PathLike | list | tuple) else path_of(path)
    dataset = StreamDataset(
        path, format=format, transform=transform, cache=cache, cache_limit=cache_limit, on_error=on_error,
        storage_options=storage_options, options=options,
    )  # fmt: skip
    if given is not path:
        check_whole(given, len(dataset))
    order = GlobalOrder(
        [dataset], batch_size, seed=seed, lanes=lanes, window=window, shuffle=shuffle, drop_last=drop_last,
        samples=epoch_size,
    )  # fmt: skip
    if not isinstance(seeded, bool):
        raise WrongType(f"«seeded={seeded!r}» is not a bool. Write True or False.")
    if seeded and on_error == "skip":
        raise WrongValue("«seeded=True» loads sample by sample, and leaves none out. Omit it, or «on_error='skip'».")
    return StreamLoader([dataset], order, seed=(seed or 0) if seeded else None, **loader)
