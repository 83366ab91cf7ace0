"""The types of Composer's signatures."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

#: A batch of any kind.
Batch = Any
#: A value that JSON has.
JSON = Any


class MemoryFormat(StrEnum):
    """The order of dimensions in memory."""

    CONTIGUOUS_FORMAT = "contiguous_format"
    CHANNELS_LAST = "channels_last"
    CHANNELS_LAST_3D = "channels_last_3d"
    PRESERVE_FORMAT = "preserve_format"
