"""What is wrong with data."""


class DataError(ValueError):
    """Training data that does not yield what a run needs."""
