"""Read files of ``torch.save``, after counting the objects in them before any of them is created. Counting needs no torch.

torch's restricted unpickler executes nothing that a file names, but performs all the work that it requests. Files of a few
bytes can request endless work: containers that hold each other, keys that take forever to hash, buffers of any size, storages
that end far behind the file.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hocket.basics import safe_files
from hocket.errors import CheckpointError

#: Objects that a file may unfold into, beyond a few for each that it contains, and how deeply they may be nested.
OBJECTS, DEPTH = 1_000_000, 200
#: The number of pickles in a file of torch before archives: magic number, protocol, system, content, names of storages.
_LEGACY = 5


class _Object:
    """An object that a pickle creates: its literal value, and the objects that it is made of or holds."""

    __slots__ = ("below", "value")

    def __init__(self, value: Any, below: list[_Object]) -> None:
        self.value, self.below = value, below


def load(source: Path | BinaryIO, allowed: Sequence[Any] = ()) -> Any:
    """Return what a file of ``torch.save`` holds, on the CPU. Nothing that it names is executed.

    Args:
        source: the file's path, or its content, such as an `io.BytesIO`.
        allowed: classes, or pairs of a function and the name that the file has for it, besides those of tensors and plain data.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
        CheckpointError: it requests more than it contains.
        Exception: any other if it is damaged, or holds other objects.
    """
    check(source)
    import torch

    with torch.serialization.safe_globals([*allowed]):
        return torch.load(source, map_location="cpu", weights_only=True)


def reason(error: BaseException) -> str:
    """Return the first line of what an unpickler says, or the name of its exception if it says nothing."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(". ")


def check(source: Path | BinaryIO) -> None:
    """Raise CheckpointError if a file of ``torch.save`` requests more than it contains; other exceptions if it is damaged."""
    if not isinstance(source, Path):
        _check_file(source)
        source.seek(0)
        return
    with safe_files.opened(source) as file:
        _check_file(file)


def _check_file(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if not zipfile.is_zipfile(file):
        file.seek(0)
        for _ in range(_LEGACY):
            _check(file, None)
        return
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
        records = {each.filename.partition("/")[2]: each for each in listed}
        if sum(each.file_size for each in listed) > size:
            raise CheckpointError("its parts have more bytes than the file, and torch.save compresses nothing.")
        if "data.pkl" not in records or len({name.casefold() for name in records}) < len(listed):
            raise CheckpointError("it is not an archive of torch.save: it has no data.pkl, or two parts of one name.")
        stream = io.BytesIO(archive.read(records["data.pkl"]))
        _check(stream, {name: each.file_size for name, each in records.items()})


def _check(stream: BinaryIO, sizes: dict[str, int] | None) -> None:
    content, written = _content(stream, sizes)
    _measure(content, OBJECTS + 4 * written)


def _content(stream: BinaryIO, sizes: dict[str, int] | None) -> tuple[_Object, int]:
    """Return the object that one pickle creates, and the number of its instructions."""
    stack: list[_Object | None] = []  # None: a mark
    memo: dict[int, _Object] = {}
    count = 0
    start = stream.tell()
    if stream.read(1) != pickle.PROTO:  # torch's unpickler knows no older protocol
        raise pickle.UnpicklingError("it is not a pickle of protocol 2 or later")
    stream.seek(start)

    def pop(what: list[Any]) -> Iterator[_Object]:
        """Yield the objects that an instruction takes from the stack, the last first."""
        for kind in reversed(what):
            if kind is pickletools.stackslice:
                while (top := stack.pop()) is not None:
                    yield top
            elif kind is not pickletools.markobject:  # went with the slice before it
                top = stack.pop()
                if top is None:
                    raise pickle.UnpicklingError("a mark where an object is expected")
                yield top

    for count, (code, argument, _) in enumerate(pickletools.genops(stream), 1):
        name = code.name
        if name == "MARK":
            stack.append(None)
        elif name == "STOP":
            return next(pop([pickletools.anyobject])), count
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = _top(stack)
        elif argument is not None and "GET" in name:
            stack.append(memo[argument])
        elif name == "DUP":
            stack.append(_top(stack))
        else:
            below = list(pop(code.stack_before))[::-1]
            if name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"):
                below[0].below += below[1:]
                stack.append(below[0])
            elif code.stack_after:
                made = _Object(name if argument is None else argument, below)
                if name == "REDUCE":
                    _check_buffer(made)
                elif name == "BINPERSID" and sizes is not None:
                    _check_storage(made, sizes)
                stack.append(made)
    raise pickle.UnpicklingError("it ends too early")


def _top(stack: list[_Object | None]) -> _Object:
    if (top := stack[-1]) is None:
        raise pickle.UnpicklingError("a mark where an object is expected")
    return top


def _check_buffer(made: _Object) -> None:
    function, arguments = made.below
    if function.value == "builtins bytearray" and any(isinstance(each.value, int) for each in arguments.below):
        raise CheckpointError("it asks for a buffer by its size alone, which torch.save does not.")


def _check_storage(made: _Object, sizes: dict[str, int]) -> None:
    (identity,) = made.below
    _, kind, key, _, elements = (each.value for each in identity.below)
    there = sizes.get(f"data/{key}")
    if there is None or type(elements) is not int or not 0 <= elements * _element(kind) <= there:
        raise CheckpointError(
            f"the storage {key!r} is said to have {elements} elements of {kind!r}; the file has {there} bytes."
        )


def _element(kind: Any) -> int:
    """Return the minimum number of bytes of a storage's element, by the name of its class."""
    name = str(kind).rpartition(" ")[2]
    wide = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
    return {**wide, "ComplexDouble": 16, "ComplexFloat": 8}.get(name.removesuffix("Storage"), 1)


def _measure(content: _Object, most: int) -> None:
    """Raise CheckpointError for cycles, for deep nesting, and for objects that are referenced so often that they explode."""
    found: dict[int, tuple[int, int]] = {}  # objects below, itself included, and levels
    entered: set[int] = set()
    left = [content]
    while left:
        each = left[-1]
        if id(each) in found:
            left.pop()
        elif id(each) not in entered:
            entered.add(id(each))
            for child in each.below:
                if id(child) in entered and id(child) not in found:  # the child contains this object
                    raise CheckpointError("its objects contain themselves.")
                if child.below and id(child) not in found:
                    left.append(child)
        else:
            left.pop()
            below = [found.get(id(child), (1, 1)) for child in each.below]
            objects, levels = 1 + sum(n for n, _ in below), 1 + max((depth for _, depth in below), default=0)
            if levels > DEPTH:
                raise CheckpointError(f"it is nested in more than {DEPTH} levels.")
            if objects > most:
                raise CheckpointError(
                    f"its objects hold each other so often that they unfold into more than {most:,} objects."
                )
            found[id(each)] = objects, levels
