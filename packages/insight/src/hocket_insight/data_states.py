"""States of data sets of other libraries from which a resumed run would not continue exactly."""

from __future__ import annotations

from hocket.help import warn


def warn_of(loader: object) -> None:
    """Warn of a data set of Hugging Face that shuffles by a buffer."""
    if _has_shuffle_buffer(loader):
        warn(
            "The state of this data set of Hugging Face is without its shuffle buffer: a run that is resumed within an "
            "epoch misses the samples in it. Shuffle the files instead, or read them by hocket_streaming.stream."
        )


def _has_shuffle_buffer(loader: object) -> bool:
    part = getattr(getattr(loader, "dataset", None), "_ex_iterable", None)
    while part is not None and not hasattr(part, "buffer_size"):
        part = getattr(part, "ex_iterable", None)
    return part is not None
