"""safetensors files, written and read in one pass that also hashes them; tensors are not copied on the way."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hocket.basics.plain_data import DTYPES
from hocket.errors import CheckpointError
from hocket_checkpoints.storage import header
from hocket_checkpoints.storage.header import Entry

#: Bytes that are hashed and written at a time; they stay in the processor's cache between the two.
CHUNK = 1 << 20


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of the dtype, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def save(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write strided tensors (any device; dtypes of :data:`header.NAMES`) and flush them; return size and SHA-256."""
    head, entries = header.lay_out((name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items())
    digest = hashlib.sha256(head)
    with path.open("xb", buffering=0) as file:
        _write(file.fileno(), memoryview(head))
        for entry in entries:
            tensor = tensors[entry.name].detach().cpu().contiguous()
            view = memory(tensor)
            for at in range(0, len(view), CHUNK):
                digest.update(view[at : at + CHUNK])
                _write(file.fileno(), view[at : at + CHUNK])
            del view
        os.fsync(file.fileno())
        size = file.tell()
    return size, digest.hexdigest()


def _write(descriptor: int, view: memoryview) -> None:
    while view:  # when a disk fills up, a partial write comes before the error
        view = view[os.write(descriptor, view) :]


def load(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file to the CPU, each with its own memory. Raises CheckpointError if it is not safetensors."""
    found: dict[str, Tensor] = {}
    read(path, new, lambda entry, tensor: found.update({entry.name: tensor}))
    return found


def new(entry: Entry) -> Tensor:
    """Return an uninitialized tensor for an entry."""
    return torch.empty(entry.shape, dtype=DTYPES[header.DTYPES[entry.dtype][0]])


def read(
    path: Path,
    target: Callable[[Entry], Tensor | None],
    filled: Callable[[Entry, Tensor], None],
    sha256: str | None = None,
) -> None:
    """Read a file's tensors one after the other.

    Args:
        target: returns the memory for an entry, a contiguous CPU tensor of as many bytes, or None to skip the entry.
        filled: called with each entry that was read.
        sha256: the expected SHA-256; if given, all of the file is read and checked.

    Raises:
        CheckpointError: the file is not a safetensors file, ends too early or has another SHA-256.
    """
    scratch = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        raw, entries = header.read(file, path.stat().st_size, path.name)
        digest = hashlib.sha256(raw)
        for entry in entries:
            tensor = target(entry)
            if tensor is None and sha256 is None:
                file.seek(entry.nbytes, os.SEEK_CUR)
                continue
            view = None if tensor is None else memory(tensor)
            at = 0
            while at < entry.nbytes:
                count = min(CHUNK, entry.nbytes - at)
                part = scratch[:count] if view is None else view[at : at + count]
                if not (got := file.readinto(part)):
                    raise CheckpointError(f"{path.name}: it ended while it was read.")
                if sha256 is not None:
                    digest.update(part[:got])
                at += got
            if tensor is not None:
                filled(entry, tensor)
    if sha256 is not None and digest.hexdigest() != sha256:
        raise CheckpointError(f"{path.name}: its content is not what was written (another SHA-256).")


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which the caller keeps alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
