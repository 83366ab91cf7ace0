"""Data sets of litdata and mosaicml-streaming, given as objects: where their files are.

Neither library is imported. Attributes of litdata 0.2.76 (``input_dir``, ``subsampled_files``, ``region_of_interest``) and of
mosaicml-streaming 0.13 (``streams``; of each ``remote``, ``local`` and ``split``) are read.
"""

from __future__ import annotations

import posixpath
from typing import Any

from hocket.errors import WrongType, WrongValue

_LIBRARIES = {"litdata": "input_dir", "streaming": "streams"}


def path_of(data: Any) -> str:
    """Return the path or URL of the files of a data set of litdata or mosaicml-streaming.

    Raises:
        TypeError: it is neither.
        ValueError: it is more than one data set.

    Example:
        >>> from hocket_streaming.foreign import path_of
        >>> class Stream:
        ...     remote, local, split = "s3://bucket/mds", "/tmp/mds", "train"
        >>> class StreamingDataset:
        ...     streams = [Stream()]
        >>> StreamingDataset.__module__ = "streaming.base.dataset"
        >>> path_of(StreamingDataset())
        's3://bucket/mds/train'
    """
    library = next((name for cls in type(data).__mro__ if (name := cls.__module__.partition(".")[0]) in _LIBRARIES), "")
    if not library or not hasattr(data, _LIBRARIES[library]):
        raise WrongType(
            f"«path» is {type(data).__name__}, which is not a path. Give a path, a URL, or a StreamingDataset of litdata or "
            "mosaicml-streaming; other data goes to a Trainer as it is."
        )
    return str(data.input_dir.url or data.input_dir.path) if library == "litdata" else _of_mosaic(data)


def check_whole(data: Any, samples: int) -> None:
    """Raise ValueError if a data set of litdata is a part of the ``samples`` that its files have."""
    part = sum(end - begin for begin, end in getattr(data, "region_of_interest", []))
    if part and part != samples:
        raise WrongValue(
            f"This StreamingDataset has {part} of the {samples} samples of {path_of(data)}: it was given subsample=. Write "
            f"stream({path_of(data)!r}, epoch_size={part}), whose epochs are different samples, until all were read."
        )


def _of_mosaic(data: Any) -> str:
    paths = [posixpath.join(each.remote or each.local, each.split or "") for each in data.streams]
    if len(paths) > 1:
        named = ", ".join(f"'{number}': stream({path!r})" for number, path in enumerate(paths))
        raise WrongValue(
            f"This StreamingDataset has {len(paths)} streams. Write mix({{{named}}}, weights={{…}}) instead."
        )
    return paths[0].rstrip("/")
