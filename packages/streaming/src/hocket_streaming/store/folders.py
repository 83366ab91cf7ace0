"""Where hocket keeps what it can fetch or compute again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SYSTEM = {"darwin": "Library/Caches", "win32": "AppData/Local"}


def default_folder(name: str) -> Path:
    """Return a folder below the user's cache folder: that of ``XDG_CACHE_HOME``, or of the operating system.

    Example:
        >>> from hocket_streaming.store.folders import default_folder
        >>> default_folder("chunks").parts[-2:]
        ('hocket', 'chunks')
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "hocket" / name if base else Path.home() / _SYSTEM.get(sys.platform, ".cache") / "hocket" / name
