"""Errors in data."""

from hocket.errors import WrongValue


class DataError(WrongValue):
    """Training data cannot yield the batches that a run needs."""


class MissingPartError(DataError, KeyError):
    """A batch has no part of this name or index."""

    __str__ = ValueError.__str__  # KeyError has the repr of its message
