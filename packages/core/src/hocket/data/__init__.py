"""Data that can be iterated from any position, by adapters; and random numbers per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket.data.adapters import adapt, adapter
    from hocket.data.batch_part import BatchPart
    from hocket.data.batches import Counts, Padding, count, join, split
    from hocket.data.containers import register_batch
    from hocket.data.errors import DataError
    from hocket.data.global_batches import sized
    from hocket.data.items import get_item, set_item
    from hocket.data.mixture import Mixture
    from hocket.data.module import DataModule
    from hocket.data.nesting import map_tensors, move
    from hocket.data.per_sample import SeededDataset, seeded
    from hocket.data.several import Several
    from hocket.data.slices import Slices
    from hocket.data.source import Position, Source
    from hocket.data.sources.base import DataSource
    from hocket.data.windows import Window

#: Public name -> the module that defines it. Modules are imported on first use, because most of hocket needs only small ones.
_MODULES = {
    "BatchPart": "batch_part",
    "Counts": "batches",
    "DataError": "errors",
    "DataModule": "module",
    "DataSource": "sources.base",
    "Mixture": "mixture",
    "Padding": "batches",
    "Position": "source",
    "SeededDataset": "per_sample",
    "Several": "several",
    "Slices": "slices",
    "Source": "source",
    "Window": "windows",
    "adapt": "adapters",
    "adapter": "adapters",
    "count": "batches",
    "get_item": "items",
    "join": "batches",
    "map_tensors": "nesting",
    "move": "nesting",
    "register_batch": "containers",
    "seeded": "per_sample",
    "set_item": "items",
    "sized": "global_batches",
    "split": "batches",
}

__all__ = [
    "BatchPart",
    "Counts",
    "DataError",
    "DataModule",
    "DataSource",
    "Mixture",
    "Padding",
    "Position",
    "SeededDataset",
    "Several",
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
    "register_batch",
    "seeded",
    "set_item",
    "sized",
    "split",
]

__getattr__, __dir__ = lazy(__name__, _MODULES)
