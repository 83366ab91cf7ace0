"""List files for the formats that look for theirs, once for all of them: a large store lists for minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

_LISTED: WeakKeyDictionary[Files, dict[str, int]] = WeakKeyDictionary()


def listed(files: Files) -> dict[str, int]:
    """Return the files below the root; none where the store cannot list them."""
    try:
        names = _LISTED.get(files) or files.names()
    except OSError:
        return {}
    if files in _LISTED:
        _LISTED[files] = names
    return names


@contextmanager
def listed_once(files: Files) -> Iterator[None]:
    """Within the block, `listed` asks for these files once."""
    _LISTED[files] = {}
    try:
        yield
    finally:
        del _LISTED[files]
