"""Paths and URLs as users give them."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

from hocket_streaming.errors import StreamError


def absolute(path: str) -> str:
    """Return a path without a slash at its end, and that of a local file from the root of the disk."""
    if path.startswith(("file://", "local://")):
        path = path.partition("://")[2]
    if "://" not in path:
        return os.path.abspath(os.path.expanduser(path))
    return path.rstrip("/")


def above(roots: Sequence[str]) -> str:
    """Return the folder above several files."""
    schemes = {root.partition("://")[0] if "://" in root else "" for root in roots}
    folders = [posixpath.dirname(root.partition("://")[2] if "://" in root else root) for root in roots]
    try:
        common = posixpath.commonpath(folders) if len(schemes) == 1 else ""
    except ValueError:
        common = ""
    if not common:
        raise StreamError(
            f"path has files without a folder in common: {roots[:3]}. Give files of one store and bucket."
        )
    scheme = schemes.pop()
    return f"{scheme}://{common}" if scheme else common
