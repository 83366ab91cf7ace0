"""The types of Composer's signatures."""

from __future__ import annotations

from typing import Any

#: A batch of any kind.
Batch = Any
#: A value that JSON has.
JSON = Any
