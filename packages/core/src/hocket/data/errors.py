"""Errors in data."""


class DataError(ValueError):
    """Training data cannot yield the batches that a run needs."""
