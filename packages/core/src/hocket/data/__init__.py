"""Data that can be iterated from any position, by adapters; batches, counted and split; random numbers per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket.data.adapters import adapt as adapt, adapter as adapter
    from hocket.data.batch_placement import move as move
    from hocket.data.batches import (
        Counts as Counts,
        Padding as Padding,
        Window as Window,
        count as count,
        join as join,
        split as split,
    )
    from hocket.data.containers import register_batch as register_batch
    from hocket.data.errors import DataError as DataError
    from hocket.data.global_batches import sized as sized
    from hocket.data.items import get_item as get_item, set_item as set_item
    from hocket.data.mixture import Mixture as Mixture
    from hocket.data.nesting import map_tensors as map_tensors
    from hocket.data.per_sample import SeededDataset as SeededDataset, seeded as seeded
    from hocket.data.rank_slices import Slices as Slices
    from hocket.data.samplers import Order as Order
    from hocket.data.source import Position as Position, Source as Source
    from hocket.data.sources.base import DataSource as DataSource
    from hocket.state.batch_part import BatchPart as BatchPart
    from hocket_data.data_module import DataModule as DataModule
    from hocket_data.several import Several as Several

__getattr__, __dir__ = lazy(__name__)
