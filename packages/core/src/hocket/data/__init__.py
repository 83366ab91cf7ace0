"""Data that can be iterated from any position, by adapters; and random numbers per sample."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.data.adapters import adapt, adapter
    from hocket.data.batches import Counts, Padding, count, get_item, join, map_tensors, move, set_item, split
    from hocket.data.errors import DataError
    from hocket.data.global_batches import sized
    from hocket.data.per_sample import SeededDataset, seeded
    from hocket.data.slices import Slices
    from hocket.data.source import Position, Source
    from hocket.data.sources.base import DataSource
    from hocket.data.windows import Window

#: Public name -> the module that defines it. Modules are imported on first use, because most of hocket needs only small ones.
_MODULES = {
    "Counts": "batches",
    "DataError": "errors",
    "DataSource": "sources.base",
    "Padding": "batches",
    "Position": "source",
    "SeededDataset": "per_sample",
    "Slices": "slices",
    "Source": "source",
    "Window": "windows",
    "adapt": "adapters",
    "adapter": "adapters",
    "count": "batches",
    "get_item": "batches",
    "join": "batches",
    "map_tensors": "batches",
    "move": "batches",
    "seeded": "per_sample",
    "set_item": "batches",
    "sized": "global_batches",
    "split": "batches",
}

__all__ = [
    "Counts",
    "DataError",
    "DataSource",
    "Padding",
    "Position",
    "SeededDataset",
    "Slices",
    "Source",
    "Window",
    "adapt",
    "adapter",
    "count",
    "get_item",
    "join",
    "map_tensors",
    "move",
    "seeded",
    "set_item",
    "sized",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hocket.data' has no attribute '{name}'; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(f"hocket.data.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
