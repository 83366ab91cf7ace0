"""Lists and tuples of batches."""

from __future__ import annotations

from typing import Any

from hocket.data.sources.base import DataSource


class Batches(DataSource):
    """A list or tuple of batches, continued by index."""

    kind = "list"
    priority = 25

    @classmethod
    def serves(cls, data: Any) -> bool:
        """Whether this is a list or tuple."""
        return isinstance(data, list | tuple)
