"""``manifest.json``: the list of a checkpoint's files. It is written last: without it, a checkpoint does not exist."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.basics import safe_files
from hocket.errors import CheckpointError, WrongValue
from hocket_checkpoints.storage import tree_json
from hocket_checkpoints.storage.header import pickled

NAME = "manifest.json"
#: The file of a store that holds the name of the checkpoint that was written last, for people and scripts.
LATEST = "latest"
#: Suffixes of other tools' files of weights.
WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
FORMAT = "hocket-checkpoint"
VERSION = 2
#: Version -> a function that upgrades the tree's JSON of that version to the next. Versions without an entry cannot be read.
UPGRADES: dict[int, Callable[[Any], Any]] = {1: lambda node: node}  # 2 added tensors in pieces
#: Names of the files beside the manifest: they end with the beginning of their SHA-256, so that no two contents share one.
FILES = re.compile(r"(tree-[0-9a-f]{16}\.json|tensors-\d{5,}-[0-9a-f]{16}\.safetensors)")
#: Bytes that a JSON file may have.
LIMIT = 1 << 28
#: The year 10,000 in seconds since 1970: a checkpoint with a later time would stay the newest forever.
_LATEST_TIME = 253_402_300_800


class Unfinished(str):
    """A message that a folder has files of a checkpoint and no manifest: its writing or its removal was interrupted."""


@dataclass(frozen=True, slots=True)
class File:
    """Size in bytes and SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files by name, and what the writer said about the whole (as encoded by `hocket_checkpoints.storage.tree_json`)."""

    files: Mapping[str, File]
    about: Any
    version: int = VERSION
    #: Seconds since 1970; orders the checkpoints of a store.
    written: float = 0.0
    #: Of the manifest's own content.
    sha256: str = field(default="", compare=False)

    @property
    def tree(self) -> str:
        """The name of the tree's file."""
        return next(name for name in self.files if name.startswith("tree-"))

    def encode(self) -> bytes:
        """The file's content; it ends with the digest of everything before it."""
        content = {
            "format": FORMAT,
            "version": self.version,
            "written": self.written,
            "about": self.about,
            "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()},
        }
        content["sha256"] = _digest(content)
        return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()


def load(folder: Path) -> Manifest:
    """Return the manifest of a folder. Raises CheckpointError if there is none or it is damaged."""
    try:
        raw = safe_files.content(folder / NAME, LIMIT, links=False)
    except (FileNotFoundError, NotADirectoryError):
        what = "the folder has no manifest.json" if folder.is_dir() else "there is no such folder"
        what = "it is a file, and a checkpoint is a folder with manifest.json" if folder.is_file() else what
        raise CheckpointError(f"{folder} is not a checkpoint: {what}.{_advice(folder)}") from None
    except safe_files.UnsafeFileError as error:
        raise CheckpointError(f"{folder}/{NAME}: {error.strerror}.") from None
    except OSError as error:  # no permission, too long a name
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from None
    return parse(raw, f"{folder}/{NAME}")


def _advice(file: Path) -> str:
    """Return advice on what was given instead of a checkpoint."""
    if file.name == LATEST and (name := pointed(file)):
        return f" It names the newest one, so give: {file.parent / name}"
    if file.suffix in WEIGHTS:
        read = "safetensors.torch.load_file" if file.suffix == ".safetensors" else "torch.load"
        return (
            f" Weights in it can be taken by trainer.load_weights('{file}') or runtime.load_model_state(model, "
            f"{read}('{file}')), and compared by: hocket checkpoint diff."
        )
    near = sorted((file if file.is_dir() else file.parent).glob(f"*/{NAME}"))
    return f" Give the folder of one, such as {near[-1].parent if near else 'runs/a/ep1-ba100'}."


def pointed(file: Path) -> str | None:
    """Return the checkpoint name in a store's file `LATEST`, or None if it has none or cannot be read."""
    try:
        return safe_files.content(file, 1 << 12, links=False).decode().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def parse(raw: bytes, where: str) -> Manifest:
    """Parse a manifest; ``where`` is for messages. Raises CheckpointError."""
    content = parse_json(raw, where)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f'{where}: it is not the manifest of a checkpoint (no "format": "{FORMAT}").')
    version = content.get("version")
    if type(version) is not int or not (version == VERSION or version in UPGRADES):
        advice = "install a newer hocket" if type(version) is int and version > VERSION else "write it anew"
        raise CheckpointError(
            f"{where}: the checkpoint has format version {version!r}; this hocket reads "
            f"{', '.join(map(str, sorted({*UPGRADES, VERSION})))}. To read it, {advice}."
        )
    stated = content.pop("sha256", None)
    try:
        if stated != _digest(content):
            raise WrongValue("its content is not what was written (another SHA-256)")
        files = {name: _file(name, about) for name, about in content["files"].items()}
        if sum(name.startswith("tree-") for name in files) != 1:
            raise WrongValue("it does not list one tree-….json")
        if type(written := content["written"]) not in (int, float) or not 0 <= written < _LATEST_TIME:
            raise WrongValue("when it was written is not a time in seconds since 1970")
        if not isinstance(tree_json.from_json(content["about"], lambda reference: None), dict):
            raise WrongValue("what it says about the checkpoint is not a JSON object")
        return Manifest(files, content["about"], version, float(written), stated)
    except KeyError as error:
        raise CheckpointError(f"{where}: it has no {error}.") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}.") from None


def _file(name: str, about: dict[str, Any]) -> File:
    if not FILES.fullmatch(name):
        raise WrongValue(f"it lists {name!r}, which is not a name of a checkpoint's file")
    size, sha256 = about["size"], about["sha256"]
    if type(size) is not int or size < 0 or not isinstance(sha256, str):
        raise WrongValue(f"it has no size and SHA-256 of {name}")
    return File(size, sha256)


def parse_json(raw: bytes, where: str) -> Any:
    """Parse JSON of bounded size, without duplicate keys, NaN or numbers of thousands of digits. Raises CheckpointError."""
    if len(raw) > LIMIT:
        raise CheckpointError(f"{where}: it has {len(raw)} bytes of JSON; at most {LIMIT} are read.")
    try:
        return json.loads(raw, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise CheckpointError(f"{where}: it is nested too deeply.") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: it is not valid JSON{pickled(raw)}: {error}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise WrongValue("an object has one key twice")
    return made


def _refuse(constant: str) -> Any:
    raise WrongValue(f"it has a bare {constant}")


def check_file(folder: Path, name: str, file: File) -> Path:
    """Return the path of a listed file. Raises CheckpointError if it does not exist or has another size."""
    path = folder / name
    try:
        about = path.lstat()
        safe_files.check(about, path)
    except FileNotFoundError:
        raise CheckpointError(f"{name}: it is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{name}: it cannot be read: {error.strerror}.") from None
    if about.st_size != file.size:
        raise CheckpointError(f"{name}: it has {about.st_size} bytes and not the {file.size} that were written.")
    return path
