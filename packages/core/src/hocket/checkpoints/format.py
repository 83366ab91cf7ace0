"""One checkpoint: a folder with ``manifest.json``, ``tree-….json`` and safetensors shards. Reading executes nothing.

Only `write` and `read` need torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hocket
from hocket.checkpoints import disk, header, leftovers
from hocket.checkpoints import manifest as manifests
from hocket.checkpoints import references as refs
from hocket.checkpoints import tree as trees
from hocket.checkpoints.errors import CheckpointError
from hocket.checkpoints.manifest import FILES, File, Manifest

if TYPE_CHECKING:
    import torch

    from hocket.checkpoints.tensors import Stored

#: Bytes after which a shard is full. Several are written and read at a time, one per thread.
SHARD = 1 << 28
#: Bytes up to which a shard also takes the next top-level entry of the tree.
SMALL = 1 << 20
_T = TypeVar("_T")
_R = TypeVar("_R")


def write(path: Path | str, tree: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write a checkpoint so that, whatever happens, ``path`` is what it was before or the whole new checkpoint.

    A checkpoint that is there already is replaced. The tensors must not change before this returns.

    Args:
        tree: dicts (with str keys), lists and tuples of tensors, numbers, strings, bools, None and bytes. Tensors that
            share memory are stored once, and share it again when read.
        about: values of the same kinds except tensors. ``format``, ``hocket`` (the version) and ``written`` (seconds since
            1970) are added where they are not given.

    Raises:
        TypeError: something in the tree cannot be stored; the message says where it is.
        CheckpointError: the disk is full, or cannot be written to; or ``path`` is there and is no checkpoint.
    """
    path = Path(path)
    about = {"format": manifests.VERSION, "hocket": hocket.__version__, "written": time.time(), **about}
    temporary = None
    try:
        disk.check_target(path)
        temporary = leftovers.begin(path)
        _fill(temporary, tree, about)
        disk.publish(temporary, path)
    except OSError as error:
        raise CheckpointError(disk.disk_error(path, error)) from error
    finally:
        if temporary is not None:
            leftovers.end(temporary)


def _fill(folder: Path, tree: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    from hocket.checkpoints import shards
    from hocket.checkpoints.tensors import Collector

    collector = Collector()
    node = trees.encode(dict(tree), collector.add)
    encoded = trees.encode(dict(about), lambda path, value: None, "about")
    files: dict[str, File] = {}

    def save(numbered: tuple[int, list[Stored]]) -> None:
        number, part = numbered
        partial = folder / f"{number}.partial"
        size, sha256 = shards.save(partial, {each.name: each.tensor for each in part})
        name = f"tensors-{number:05}-{sha256[:16]}.safetensors"
        partial.rename(folder / name)
        files[name] = File(size, sha256)
        for each in part:
            for reference in each.references:
                reference.update(file=name, name=each.name)

    _parallel(save, list(enumerate(_parts(collector.stored()), 1)))
    raw = json.dumps(node, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > manifests.LIMIT:
        raise CheckpointError(
            f"Without its tensors the tree takes {len(raw)} bytes of JSON; at most {manifests.LIMIT} are read. "
            "Give long lists and bytes as tensors: torch.tensor(numbers), torch.frombuffer(data, dtype=torch.uint8)."
        )
    sha256 = hashlib.sha256(raw).hexdigest()
    name = f"tree-{sha256[:16]}.json"
    disk.write_file(folder / name, raw)
    files = {name: File(len(raw), sha256), **dict(sorted(files.items()))}
    disk.write_file(folder / manifests.NAME, Manifest(files, encoded, written=float(about["written"])).encode())
    disk.flush(folder)


def _parts(stored: Iterable[Stored]) -> list[list[Stored]]:
    """Shards: large ones are of one top-level entry of the tree, so that parts of a checkpoint can be read alone."""
    parts: list[list[Stored]] = []
    size, top = 0, None
    for each in stored:
        key, nbytes = each.name.partition(".")[0], each.tensor.numel() * each.tensor.element_size()
        if not parts or size + nbytes > (SHARD if key == top else SMALL):
            parts.append([])
            size = 0
        top = key
        parts[-1].append(each)
        size += nbytes
    return parts


def read(path: Path | str, *, device: torch.device | str = "cpu", only: Sequence[str] | None = None) -> dict[str, Any]:
    """The tree that was written, its tensors on ``device`` and without gradients.

    Args:
        only: globs of dotted paths, such as ``["model", "optimizers.0.*"]``: what matches, and what is below it. Lists lose the
            items that do not match; files that hold none of it are not read.

    Raises:
        CheckpointError: it is no checkpoint, is damaged, has an unknown format version, or has nothing that matches ``only``.
            The message names the file.
    """
    from hocket.checkpoints import shards
    from hocket.checkpoints.tensors import Restorer

    folder = Path(path)
    manifest = manifests.load(folder)
    node, wanted = _wanted(folder, manifest, only)

    def load(item: tuple[str, set[str]]) -> tuple[str, dict[str, torch.Tensor]]:
        name, names = item
        loaded = shards.load(
            manifests.check_file(folder, name, manifest.files[name]), names, manifest.files[name].sha256
        )
        return name, {key: tensor.to(device) for key, tensor in loaded.items()}

    restorer = Restorer(dict(_parallel(load, list(wanted.items()))))
    try:
        made: dict[str, Any] = trees.decode(node, restorer)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}/{manifest.tree}: {error}.") from None
    return made


def needed(path: Path | str, only: Sequence[str] | None = None) -> list[str]:
    """Names of the shards that `read` would read. The folder need not have them yet. Raises CheckpointError."""
    folder = Path(path)
    manifest = manifests.load(folder)
    return sorted({reference["file"] for _, reference in _listed(manifest, _tree(folder, manifest, only))})


def about(path: Path | str) -> dict[str, Any]:
    """What the writer said about the checkpoint. Raises CheckpointError if there is none."""
    return decode_about(manifests.load(Path(path)))


def decode_about(manifest: Manifest) -> dict[str, Any]:
    """The same, for a manifest."""
    try:
        made: dict[str, Any] = trees.decode(manifest.about, lambda reference: None)
    except ValueError as error:
        raise CheckpointError(f"{manifests.NAME}: {error}.") from None
    return made


def verify(path: Path | str) -> list[str]:
    """What is wrong with a checkpoint, each beginning with the file's name; empty if it is as it was written.

    Files that the manifest does not list are named too, though `read` never looks at them. Needs no torch.
    """
    folder = Path(path)
    problems = damage(folder)
    if folder.is_dir():
        extra = sorted(e.name for e in folder.iterdir() if e.name != manifests.NAME and not FILES.fullmatch(e.name))
        problems += [f"{name}: it is no part of the checkpoint, and is never read." for name in extra]
    return problems


def damage(folder: Path) -> list[str]:
    """As `verify`, without the files that `read` never looks at."""
    try:
        manifest = manifests.load(folder)
    except CheckpointError as error:
        return [str(error)]

    def check(item: tuple[str, File]) -> str:
        try:
            with manifests.check_file(folder, *item).open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != item[1].sha256:
                    return f"{item[0]}: its content is not what was written (another SHA-256)."
        except (CheckpointError, OSError) as error:
            return str(error)
        return ""

    problems = [problem for problem in _parallel(check, list(manifest.files.items())) if problem]
    if not problems:
        try:
            node, _ = _wanted(folder, manifest, None)
            trees.decode(node, lambda reference: None)
        except (CheckpointError, ValueError) as error:
            problems.append(str(error))
    return problems


def structure(path: Path | str, only: Sequence[str] | None = None) -> Any:
    """The tree's JSON (see `hocket.checkpoints.tree`), every reference checked. Needs no torch. Raises CheckpointError."""
    folder = Path(path)
    return _wanted(folder, manifests.load(folder), only)[0]


def _wanted(folder: Path, manifest: Manifest, only: Sequence[str] | None) -> tuple[Any, dict[str, set[str]]]:
    """The tree's JSON, and the names of its tensors by file. Nothing that was stated is taken on trust."""
    node = _tree(folder, manifest, only)
    listed = _listed(manifest, node)
    wanted: dict[str, set[str]] = {}
    for _, reference in listed:
        wanted.setdefault(reference["file"], set()).add(reference["name"])
    entries = {}
    for name in wanted:
        path = manifests.check_file(folder, name, manifest.files[name])
        with path.open("rb") as opened:
            entries[name] = {entry.name: entry for entry in header.read(opened, path.stat().st_size, name)[1]}
    for place, reference in listed:
        refs.check(place, reference, entries)
    return node, wanted


def _tree(folder: Path, manifest: Manifest, only: Sequence[str] | None) -> Any:
    name = manifest.tree
    raw = manifests.check_file(folder, name, manifest.files[name]).read_bytes()
    if hashlib.sha256(raw).hexdigest() != manifest.files[name].sha256:
        raise CheckpointError(f"{name}: its content is not what was written (another SHA-256).")
    node = manifests.parse_json(raw, name)
    for version in range(manifest.version, manifests.VERSION):
        node = manifests.UPGRADES[version](node)
    if not isinstance(node, dict):
        raise CheckpointError(f"{name}: it is no JSON object.")
    if only is None:
        return node
    try:
        chosen = trees.select(node, only)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{name}: {error}.") from None
    if chosen is None:
        raise CheckpointError(
            f"{folder} has nothing that matches {', '.join(only)}. It has: {', '.join(node) or 'nothing'}."
        )
    return chosen


def _listed(manifest: Manifest, node: Any) -> list[tuple[str, dict[str, Any]]]:
    found = list(refs.references(node, manifest.tree))
    for place, reference in found:
        name = reference["file"]
        if name not in manifest.files or name == manifest.tree:
            raise CheckpointError(f"{name}: it is wanted at '{place}', and is no shard that the manifest lists.")
    return found


def _parallel(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Map, on a few threads if there are several items: hashing and files leave the interpreter to others."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1, len(items))) as pool:
        return list(pool.map(function, items))
