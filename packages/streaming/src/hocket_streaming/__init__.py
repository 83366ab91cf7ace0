"""Data sets in chunks, in object stores or on disk: the same global batches on any number of ranks and workers.

`shards` says what a format is, and `formats` has the formats of hocket. `store` reads files behind URLs and keeps chunks
in a cache. `order` computes which samples a global batch has. `dataset` and `loader` put them together, and `commands` adds
``hocket data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_streaming.dataset import StreamDataset as StreamDataset
    from hocket_streaming.loader import StreamLoader as StreamLoader, stream as stream
    from hocket_streaming.mixtures import mix as mix
    from hocket_streaming.monitor import StreamMonitor as StreamMonitor
    from hocket_streaming.order.sampler import GlobalOrder as GlobalOrder, RankSlice as RankSlice
    from hocket_streaming.shards import Chunk as Chunk, Part as Part, Shards as Shards
    from hocket_streaming.store.files import Files as Files
    from hocket_streaming.writing.mds import MDSWriter as MDSWriter
    from hocket_streaming.writing.write import Written as Written, write as write

__getattr__, __dir__ = lazy(__name__)
