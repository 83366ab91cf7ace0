"""Names of files and objects, as Composer's utilities read and write them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from hocket.errors import ExistingFile
from hocket_migration.composer.core.time import Timestamp
from hocket_migration.composer.utils import dist


def import_object(name: str) -> Any:
    """Return the object that ``"module:name"`` names.

    Example:
        >>> from hocket_migration.composer.utils import import_object
        >>> import_object("functools:partial")
        <class 'functools.partial'>
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def parse_uri(uri: str | Path) -> tuple[str, str, str]:
    """Return scheme, bucket and path; of a local path the scheme is empty.

    Example:
        >>> from hocket_migration.composer.utils import parse_uri
        >>> parse_uri("s3://bucket/runs/a"), parse_uri("runs/a")
        (('s3', 'bucket', 'runs/a'), ('', '', 'runs/a'))
    """
    found = urlparse(str(uri))
    path = found.path.lstrip("/") if found.scheme else found.path
    return found.scheme, found.netloc.partition("@")[0], path


def partial_format(s: str, *args: Any, **kwargs: Any) -> str:
    """Format a text; placeholders without a value stay."""
    while True:
        try:
            return s.format(*args, **kwargs)
        except IndexError:
            args += ("{}",)
        except KeyError as error:
            kwargs[error.args[0]] = f"{{{error.args[0]}}}"


def format_name_with_dist(format_str: str, run_name: str, **extra_format_kwargs: Any) -> str:
    """Replace ``{run_name}``, ``{rank}`` and the other placeholders of ranks, and those that are given."""
    ranks = {
        "rank": dist.get_global_rank(),
        "local_rank": dist.get_local_rank(),
        "world_size": dist.get_world_size(),
        "local_world_size": dist.get_local_world_size(),
        "node_rank": dist.get_node_rank(),
    }
    return partial_format(format_str, run_name=run_name, **ranks, **extra_format_kwargs)


def format_name_with_dist_and_time(
    format_str: str, run_name: str, timestamp: Timestamp, **extra_format_kwargs: Any
) -> str:
    """Replace the placeholders of `format_name_with_dist`, and those of the position, such as ``{epoch}`` and ``{batch}``.

    Example:
        >>> from hocket_migration.composer import Timestamp
        >>> from hocket_migration.composer.utils import format_name_with_dist_and_time
        >>> format_name_with_dist_and_time("{run_name}/ep{epoch}-rank{rank}.pt", "a", Timestamp(epoch=2))
        'a/ep2-rank0.pt'
    """
    position = timestamp.state_dict()
    seconds = {name: each.total_seconds() for name, each in position.items() if name.endswith("_wct")}
    return format_name_with_dist(format_str, run_name, **{**position, **seconds, **extra_format_kwargs})


def ensure_folder_is_empty(folder_name: str | Path) -> None:
    """Make a folder. Raises FileExistsError if there are files in it."""
    folder = Path(folder_name)
    folder.mkdir(parents=True, exist_ok=True)
    if found := next(folder.rglob("*"), None):
        raise ExistingFile(f"{folder} is not empty: it has {found.relative_to(folder)}. Choose another folder.")
