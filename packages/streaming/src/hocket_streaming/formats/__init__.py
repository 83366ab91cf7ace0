"""The formats that hocket reads, and `find`, which chooses one for the files of a data set."""

from __future__ import annotations

import difflib
import inspect
import posixpath
from collections import Counter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from hocket.basics.masking import masked
from hocket.errors import WrongFile, WrongType
from hocket_streaming.errors import MissingData, StreamError, Unreachable
from hocket_streaming.shards import INDEX, Shards

if TYPE_CHECKING:
    from hocket_streaming.store.files import Files

_KIND = "shards"


def find(files: Files, format: str | type[Shards] | None = None, **options: Any) -> Shards:
    """Return the data set as an object of its format.

    Args:
        files: its files.
        format: the name of a format, such as ``"mds"``, or its class; None for the one that these files are of.
        **options: options of the format, such as ``length=2048``.

    Raises:
        hocket.errors.WrongFile: the files are of no format, or of several.
        hocket.errors.WrongType: the format has no such option.
        hocket.basics.plugin_errors.PluginError: there is no format of this name.

    Example:
        >>> import pathlib, tempfile
        >>> from hocket_streaming.formats import find
        >>> from hocket_streaming.store.files import Files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "notes.jsonl").write_text('{"note": "do"}\\n')
        >>> find(Files(str(folder)))
        <hocket_streaming.formats.lines.JsonLines object at ...>
    """
    from hocket.plugins import registry

    named = registry.get(_KIND, format) if isinstance(format, str) else format
    cls, stored = _detected(files) if named is None else (named, {})
    options = stored | options
    known = [name for name in inspect.signature(cls).parameters if name != "files"]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}=?" if near else ""
            raise WrongType(
                f"{cls.__name__}, the format of {files.url()}, has no option {name}=.{hint} It has "
                f"{', '.join(known) or 'no options'}."
            )
    made: Shards = cls(files, **options)
    return made


def _detected(files: Files) -> tuple[type[Shards], dict[str, Any]]:
    """Return the class of the one format that serves these files, and the options of an index that says it."""
    from hocket.plugins import PluginError, registry

    folder, name = posixpath.split(files.path)
    if name.endswith((".json", ".mds")) and name in files.listed():
        raise WrongFile(f"{files.url()} is one file of a data set. Name its folder: {masked(folder)}")
    serving: dict[str, type[Shards]] = {}
    broken: list[str] = []
    entries = registry.choices(_KIND)
    for entry in entries:
        try:
            cls = entry.load()
        except PluginError as error:
            broken.append(str(error))
            continue
        try:
            if cls.serves(files):
                serving[entry.name] = cls
        except Unreachable:
            raise
        except StreamError:
            continue  # the store cannot list its files, or refuses to, which is said below
    if len(serving) == 1:
        (only,) = serving.values()
        return only, {}
    if serving:
        names = sorted(serving)
        raise WrongFile(
            f"{files.url()} has files of several formats: {', '.join(names)}. Write format='{names[0]}' for one of them, or "
            "name a folder that has one."
        )
    if files.has(INDEX):  # where a store cannot list its files
        from hocket_streaming.indexes import described

        name, options = described(files)
        return registry.get(_KIND, name), options
    if any(sign in files.path for sign in "*?["):
        raise MissingData(
            f"{files.url()}: patterns are not expanded. Name the folder, or list the files: path=['a', 'b']."
        )
    endings = Counter("".join(PurePosixPath(name).suffixes[-2:]) or "without an ending" for name in files.names())
    there = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(5))
    others = f" Formats that cannot be used: {' '.join(broken)}" if broken else ""
    raise WrongFile(
        f"{files.url()} is of no format that is installed. It has files {there}. The formats are "
        f"{', '.join(entry.name for entry in entries)}: name one by format= (on the command line "
        f"--source-format), such as text for any files of text, or install a package with a "
        f"plug-in of the group hocket.v1.{_KIND}; `hocket plugins new {_KIND} NAME` begins one.{others}"
    )
