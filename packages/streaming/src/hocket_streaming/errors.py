"""Errors of data in object stores. Their texts name the URL, the chunk and the cause, and say what to do."""

from __future__ import annotations

from hocket.errors import WrongFile


class StreamError(WrongFile):
    """Data of a stream cannot be read or written. It is the base class of the errors below.

    Example:

        >>> from hocket_streaming.errors import StreamError
        >>> try:
        ...     raise StreamError("s3://bucket/mds/index.json cannot be read.")
        ... except OSError as error:
        ...     print(error)
        s3://bucket/mds/index.json cannot be read.
    """


class MissingData(StreamError):
    """A file of the data set does not exist."""


class AccessDenied(StreamError):
    """The store refuses access: wrong, missing or expired credentials."""


class DamagedData(StreamError):
    """A chunk is shorter or longer than its index says, or its checksum differs, also after it was fetched again."""


class Unreachable(StreamError):
    """The store failed, was silent or cut connections in every attempt."""
