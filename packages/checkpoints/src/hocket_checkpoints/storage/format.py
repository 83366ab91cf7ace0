"""One checkpoint: a folder with ``manifest.json``, ``tree-….json`` and safetensors shards. Reading executes nothing.

Only `write` and `read` need torch.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hocket.basics import safe_files
from hocket.errors import CheckpointError
from hocket.state.ranks import ALONE, Ranks
from hocket_checkpoints.storage import disk, header, manifest as manifests, partials, references as refs, tree_json
from hocket_checkpoints.storage.manifest import FILES, File, Manifest

if TYPE_CHECKING:
    import torch

    from hocket_checkpoints.storage.snapshot import Snapshot
    from hocket_checkpoints.storage.tensors import Stored

    Like = Callable[[str, dict[str, Any]], torch.Tensor | None]

#: Bytes after which a shard is full. Small checkpoints have several shards too, so that all threads have something to read.
SHARD = 1 << 27
SHARDS, LEAST = 16, 1 << 23
#: Number of shards written and read at a time, one per thread: while one waits for the disk, others are hashed.
THREADS = 4
#: Bytes up to which a shard also takes the next top-level entry of the tree.
SMALL = 1 << 20
_T = TypeVar("_T")
_R = TypeVar("_R")


def write(path: Path | str, tree: Mapping[str, Any] | Snapshot, about: Mapping[str, Any], ranks: Ranks = ALONE) -> None:
    """Write a checkpoint so that, whatever happens, ``path`` is unchanged or has the complete new checkpoint.

    An existing checkpoint is replaced. The tensors must not change before this returns.

    Args:
        tree: dicts (with str keys), lists and tuples of tensors, numbers, strings, bools, None and bytes. Tensors that
            share memory are stored once, and share it again when read. Or a `Snapshot` of such a tree.
        about: values of the same kinds except tensors. ``format``, ``hocket`` (the version) and ``written`` (seconds since
            1970) are added if they are not given.
        ranks: the ranks that call this together, with the same arguments and one folder. Each writes its shards of DTensors;
            rank 0 writes everything else, which is assumed to be identical on all ranks.

    Raises:
        TypeError: something in the tree cannot be stored; the message names its path.
        CheckpointError: the disk is full, or cannot be written to; or ``path`` exists and is not a checkpoint. If it is raised
            on one rank, it is raised on all.
    """
    from hocket_checkpoints.storage.snapshot import Snapshot

    path = Path(path)
    snapshot = tree if isinstance(tree, Snapshot) else ranks.agree(lambda: Snapshot(tree, ranks.rank))

    def begin() -> str:
        with disk.errors(path):
            disk.check_target(path)
            return partials.begin(path).name

    temporary = path.parent / ranks.first(begin)

    def part() -> Part:
        if snapshot.stored and not temporary.is_dir():
            raise CheckpointError(
                f"{path} was not written: {temporary.absolute()}, which rank 0 has made, is not there on "
                f"{socket.gethostname()}. Ranks write their shards into one folder: give one on a file system that all of "
                "them share, or a URL such as s3://bucket/run."
            )
        with disk.errors(path):
            return write_part(temporary, snapshot, ranks)

    def end() -> None:
        with disk.errors(path):
            finish(temporary, snapshot, parts, about)
            disk.publish(temporary, path)

    try:
        parts = ranks.gather(ranks.agree(part))
        ranks.first(end)
    finally:
        if ranks.rank == 0:
            partials.end(temporary)


@dataclass(frozen=True, slots=True)
class Part:
    """The files that a rank has written, and for each sharded tensor its path and the rank's piece, or None."""

    files: dict[str, File]
    pieces: list[tuple[str, dict[str, Any] | None]]


def write_part(folder: Path, snapshot: Snapshot, ranks: Ranks) -> Part:
    """Write a rank's tensors."""
    from hocket_checkpoints.storage import shards

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

    mine = _parts(snapshot.stored)
    _parallel(save, [(1 + ranks.rank + index * ranks.size, part) for index, part in enumerate(mine)])
    return Part(files, [(path, piece) for path, _, piece in snapshot.sharded])


def finish(folder: Path, snapshot: Snapshot, parts: Sequence[Part], about: Mapping[str, Any]) -> None:
    """Write rank 0's tree and finally the manifest. Raises CheckpointError unless the ranks' pieces make up full tensors."""
    encoded = tree_json.to_json(_about(about), lambda path, value: None, "about")
    for index, (path, reference, _) in enumerate(snapshot.sharded):
        found = [part.pieces[index] if len(part.pieces) > index else ("", None) for part in parts]
        reference["pieces"] = [piece for _, piece in found if piece is not None]
        if any(theirs != path for theirs, _ in found) or not refs.whole(reference):
            raise CheckpointError(
                f"The pieces that the ranks have of '{path}' do not make up a tensor of shape {reference['shape']}. Every "
                "rank has to give the same tree, with its own shards."
            )
    raw = json.dumps(snapshot.node, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > manifests.LIMIT:
        raise CheckpointError(
            f"Without its tensors the tree takes {len(raw)} bytes of JSON; at most {manifests.LIMIT} are read. "
            "Give long lists and bytes as tensors: torch.tensor(numbers), torch.frombuffer(data, dtype=torch.uint8)."
        )
    sha256 = hashlib.sha256(raw).hexdigest()
    name = f"tree-{sha256[:16]}.json"
    disk.write_file(folder / name, raw)
    files = {name: File(len(raw), sha256), **dict(sorted(item for part in parts for item in part.files.items()))}
    manifest = Manifest(files, encoded, written=float(encoded["written"]))
    disk.write_file(folder / manifests.NAME, manifest.encode())
    disk.flush(folder)


def _about(about: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": manifests.VERSION, "hocket": metadata.version("hocket"), "written": time.time(), **about}


def _parts(stored: Sequence[Stored]) -> list[list[Stored]]:
    """Group tensors into shards. A large shard has one top-level entry of the tree, so that parts can be read alone."""
    parts: list[list[Stored]] = []
    size, top = 0, None
    full = min(SHARD, max(LEAST, sum(each.tensor.nbytes for each in stored) // SHARDS))
    for each in stored:
        key, nbytes = each.name.partition(".")[0], each.tensor.nbytes
        if not parts or size + nbytes > (full if key == top else SMALL):
            parts.append([])
            size = 0
        top = key
        parts[-1].append(each)
        size += nbytes
    return parts


def read(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    only: Sequence[str] | None = None,
    like: Like | None = None,
) -> dict[str, Any]:
    """Read the tree of a checkpoint, with tensors on ``device`` and without gradients.

    Args:
        only: globs of dotted paths, such as ``["model", "optimizers.0.*"]``: read the matches, and everything below them. Lists
            lose the items that do not match; files without matches are not read.
        like: chooses the tensors to read as DTensors. It is called with a path and the description of the tensor there
            (``dtype``, ``shape``, and ``pieces`` if it was sharded), and returns a DTensor of that shape with the wanted
            sharding, or None. Only this rank's shard of such a tensor is read. Nothing is communicated.

    Raises:
        CheckpointError: it is not a checkpoint, is damaged, has an unknown format version, or has nothing that matches
            ``only``. The message names the file.
    """
    from hocket_checkpoints.storage import shards
    from hocket_checkpoints.storage.assembly import Assembly

    folder = Path(path)
    try:
        manifest = manifests.load(folder)
        node, wanted = _wanted(folder, manifest, only, like)
        made = Assembly(((each.reference, each.like) for each in wanted), device)

        def load(name: str) -> None:
            file = manifest.files[name]
            shards.read(
                manifests.check_file(folder, name, file),
                lambda entry: made.target(name, entry),
                lambda entry, tensor: made.filled(name, entry, tensor),
                file.sha256,
            )

        files = {file for each in wanted for file in each.files}
        # The largest first, so that threads end together.
        _parallel(load, sorted(files, key=lambda name: (-manifest.files[name].size, name)))
        tree: dict[str, Any] = tree_json.from_json(node, made)
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: {error}.") from None
    return tree


def needed(path: Path | str, only: Sequence[str] | None = None, like: Like | None = None) -> list[str]:
    """Return the names of the shards that `read` would read. The folder need not have them yet. Raises CheckpointError."""
    folder = Path(path)
    manifest = manifests.load(folder)
    listed = _listed(manifest, _tree(folder, manifest, only), like)
    return sorted({file for each in listed for file in each.files})


def about(path: Path | str) -> dict[str, Any]:
    """Return the writer's description of the checkpoint. Raises CheckpointError if there is none."""
    return decode_about(manifests.load(Path(path)))


def decode_about(manifest: Manifest) -> dict[str, Any]:
    """Return the writer's description from a manifest."""
    try:
        made: dict[str, Any] = tree_json.from_json(manifest.about, lambda reference: None)
    except ValueError as error:
        raise CheckpointError(f"{manifests.NAME}: {error}.") from None
    return made


def verify(path: Path | str) -> list[str]:
    """Return the problems of a checkpoint, each beginning with the file's name; empty if it is undamaged.

    Files that the manifest does not list are named too, although `read` ignores them. Needs no torch.
    """
    folder = Path(path)
    problems = damage(folder)
    if (folder / manifests.NAME).exists():
        extra = sorted(e.name for e in folder.iterdir() if e.name != manifests.NAME and not FILES.fullmatch(e.name))
        problems += [f"{name}: it is not part of the checkpoint, and is never read." for name in extra]
    return problems


def damage(folder: Path) -> list[str]:
    """Return problems as `verify`, without the files that `read` ignores."""
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
            tree_json.from_json(node, lambda reference: None)
        except (CheckpointError, ValueError) as error:
            problems.append(str(error))
    return problems


def structure(path: Path | str, only: Sequence[str] | None = None) -> Any:
    """Return the tree's JSON (see `.tree_json`), with every reference checked. Needs no torch. Raises CheckpointError."""
    folder = Path(path)
    return _wanted(folder, manifests.load(folder), only)[0]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of the tree, and the files to read for it."""

    place: str
    reference: dict[str, Any]
    like: torch.Tensor | None
    files: set[str]


def _wanted(
    folder: Path, manifest: Manifest, only: Sequence[str] | None, like: Like | None = None
) -> tuple[Any, list[_Wanted]]:
    """Return the tree's JSON and its tensors. Every statement in the files is checked."""
    node = _tree(folder, manifest, only)
    listed = _listed(manifest, node, like)
    entries = {}
    for name in sorted({file for each in listed for file in each.files}):
        path = manifests.check_file(folder, name, manifest.files[name])
        with path.open("rb") as opened:
            entries[name] = {entry.name: entry for entry in header.read(opened, path.stat().st_size, name)[1]}
    for each in listed:
        refs.check(each.place, each.reference, entries)
    return node, listed


def _tree(folder: Path, manifest: Manifest, only: Sequence[str] | None) -> Any:
    name = manifest.tree
    raw = safe_files.content(manifests.check_file(folder, name, manifest.files[name]), manifests.LIMIT, links=False)
    if hashlib.sha256(raw).hexdigest() != manifest.files[name].sha256:
        raise CheckpointError(f"{name}: its content is not what was written (another SHA-256).")
    node = manifests.parse_json(raw, name)
    for version in range(manifest.version, manifests.VERSION):
        node = manifests.UPGRADES[version](node)
    if not isinstance(node, dict):
        raise CheckpointError(f"{name}: it is not a JSON object.")
    if only is None:
        return node
    try:
        chosen = tree_json.select(node, only)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{name}: {error}.") from None
    if chosen is None:
        raise CheckpointError(
            f"{folder} has nothing that matches {', '.join(only)}. It has: {', '.join(node) or 'nothing'}."
        )
    return chosen


def _listed(manifest: Manifest, node: Any, like: Like | None) -> list[_Wanted]:
    found = []
    for place, reference in refs.references(node, manifest.tree):
        pieces = refs.pieces(reference)
        for name in (each["file"] for each in pieces):
            if name not in manifest.files or name == manifest.tree:
                raise CheckpointError(f"{name}: it is wanted at '{place}', and is not a shard that the manifest lists.")
        # Tensors with a custom memory format, or with shared memory, are read in full.
        shard = None if like is None or "stride" in reference else like(place, reference)
        if shard is not None:
            from hocket_checkpoints.storage.assembly import box

            pieces = [each for each in pieces if refs.overlap(each, *box(reference, shard)) is not None]
        found.append(_Wanted(place, reference, shard, {each["file"] for each in pieces}))
    return found


def _parallel(function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Map, on a few threads if there are several items: hashing and file access release the GIL."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, len(items))) as pool:
        return list(pool.map(function, items))
