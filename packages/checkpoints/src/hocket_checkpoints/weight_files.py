"""Read weights from checkpoints and from other tools' files. Nothing in the files is executed."""

from __future__ import annotations

import os
import re
import stat
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.basics import safe_files
from hocket.basics.plain_data import decode
from hocket.errors import CheckpointError, WrongType
from hocket_checkpoints import hub, pickles
from hocket_checkpoints.storage import format as formats, manifest as manifests, shards
from hocket_checkpoints.storage.store import Store
from hocket_checkpoints.storage.urls import local_folder
from hocket_checkpoints.weight_differences import some

#: A Hugging Face folder's index or single file, in the order in which they are looked for.
_HUGGING_FACE = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
#: The keys under which files hold weights, besides other content.
_INSIDE = ("state_dict", "model_state_dict", "model")
#: The keys of the weights and of their name prefix in our own checkpoints.
_OF_OURS = ("model", "model_prefix")
#: Name prefixes that wrappers add.
_WRAPPERS = ("module.", "_orig_mod.")
#: Classes in checkpoints of Composer besides weights, for times and random numbers. A `_Omitted` replaces their objects.
_NOT_WEIGHTS = (
    "datetime.timedelta",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
)


#: Maximum number of characters of all names in a file together.
_NAMES = 1 << 26
#: Bytes that weights may have beyond a multiple of the stored bytes: a number may be expanded to any shape.
_EXPANDED = 1 << 30


class _Omitted:
    """A placeholder for an object of a file that is not a weight. Its arguments and its state are ignored."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class Weights(dict[str, Tensor]):
    """Weights by name, and the prefixes that were removed from all names, the outermost first."""

    removed: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the dict of a ``state_dict``, which torch reads without this class."""
        return OrderedDict, (), None, None, iter(self.items())

    def namings(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights by the prefix that they lack: all that may be removed, without the innermost, and so on."""
        prefixes = ["".join(self.removed[:index]) for index in range(len(self.removed), -1, -1)]
        beginnings = {prefix: "".join(self.removed).removeprefix(prefix) for prefix in prefixes}
        return {prefix: {kept + name: each for name, each in self.items()} for prefix, kept in beginnings.items()}


def read_weights(path: Path | str, network: bool = False) -> dict[str, Tensor]:
    """Return weights by name, on the CPU.

    Args:
        path: a checkpoint of hocket or its URL (by the model's own names), ``latest`` or ``best`` in a folder of them, a
            ``.safetensors`` file, a file of ``torch.save`` that holds a ``state_dict`` or is a checkpoint of Lightning or
            Composer, or a folder of Hugging Face, sharded or not.
            Prefixes of all names are removed if they come from a wrapper: ``module.``, ``_orig_mod.``, and for Lightning
            and Composer ``model.``. `load_weights` still knows them, for a module that has such a submodule itself.
            ``hub:org/name`` is a model in the cache of Hugging Face on this machine (``hub:org/name@revision``,
            ``hub:org/name/file.safetensors``), which huggingface_hub finds.
        network: whether to download a model of the hub that is not in the cache.

    Raises:
        CheckpointError: the file has another format, is damaged, or could be read only by executing code; or a model is not
            in the cache.
        ImportError: huggingface_hub is not installed, for ``hub:``.

    Example:
        >>> import tempfile, torch
        >>> from hocket.checkpoints import read_weights
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.Linear(4, 1).state_dict(), f"{folder}/model.pt")
        ...     weights = read_weights(f"{folder}/model.pt")
        >>> list(weights)
        ['weight', 'bias']
    """
    if not isinstance(path, str | os.PathLike):
        raise WrongType(
            f"read_weights({path!r}): give the path of a file or of a folder. Write read_weights('model.pt')."
        )
    if str(path).startswith(hub.PREFIX):
        return _read(hub.cached(str(path), network))
    with local_folder(path, _OF_OURS) as local:
        return _read(local)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no {path}{'' if path.is_absolute() else f' in {os.getcwd()}'}. Give the path of a file or of a "
            "checkpoint's folder, such as 'model.pt' or 'runs/a/ep3-ba18', or 'hub:org/name' for a model in the cache of "
            "Hugging Face." + _if_import_path(str(path))
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: it cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not stat.S_ISDIR(kind):
        return _strip(*_read_file(path))
    if (path / manifests.NAME).exists():
        try:
            tree = formats.read(path, only=_OF_OURS)
        except CheckpointError as error:
            raise CheckpointError(f"{path} cannot be read: {error}{_healthy_beside(path)}") from None
        prefix = str(tree.get("model_prefix", ""))
        try:
            named = _flat(decode(tree.get("model"), copy=False), str(path), ours=True)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}.") from None
        return {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
    name = next((name for name in _HUGGING_FACE if (path / name).exists()), None)
    if name is None:
        found = [*(path / each for each in Store(path).names()[-1:]), *sorted(path.glob("*.safetensors"))]
        raise CheckpointError(
            f"{path} has no weights itself: neither {manifests.NAME} nor one of {', '.join(_HUGGING_FACE)}. "
            + (f"There is '{found[0]}' in it: give that path." if found else "To read one file, give its path.")
        )
    if not name.endswith(".index.json"):
        return _strip(*_read_file(path / name))
    return _read_index(path, name)


def _healthy_beside(folder: Path) -> str:
    """Name the newest undamaged checkpoint of the same folder, as advice; return an empty text if all are damaged."""
    others = (folder.parent / name for name in reversed(Store(folder.parent).names()) if name != folder.name)
    healthy = next((other for other in others if not formats.damage(other)), None)
    return f" Give another checkpoint: '{healthy}' is complete." if healthy else ""


def _if_import_path(text: str) -> str:
    """Return advice on ``module:function``, which only configuration files import; empty for any other text."""
    module, colon, name = text.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return ""
    return f" If it is a function, as in a configuration file, import it: from {module} import {name}; and give {name}."


def _read_index(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        raw = safe_files.content(folder / name, manifests.LIMIT)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: {error.strerror or error}.") from None
    index = manifests.parse_json(raw, name)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{name}: it has no weight_map from names to files.")
    weights: dict[str, Tensor] = {}
    for file in dict.fromkeys(places.values()):
        if file != Path(file).name or "\\" in file or file in ("", ".", ".."):
            raise CheckpointError(f"{name}: it lists '{file}', which is not a file of its own folder.")
        if not os.path.exists(folder / file):  # Path.exists raises for names that are too long
            raise CheckpointError(f"{file}: it is missing, though {name} lists it.")
        weights |= _read_file(folder / file)[0]
    if missing := sorted(set(places) - set(weights)):
        raise CheckpointError(f"{folder}: its files lack {some(missing)}, though {name} lists them.")
    return {key: weights[key] for key in places}


def _read_file(path: Path) -> tuple[dict[str, Tensor], Sequence[str]]:
    """Return the weights, and the prefixes that may be removed from their names."""
    _check_kind(path)
    if path.name == manifests.LATEST and (name := manifests.pointed(path)):
        raise CheckpointError(
            f"{path} names the newest checkpoint, '{name}', which is missing or damaged. Give the path of another."
        )
    try:
        if path.suffix == ".safetensors":
            return shards.load(path), ()
        content = pickles.load(path, [(_Omitted, name) for name in _NOT_WEIGHTS])
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be read: {error.strerror or error}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path.name}: ')}") from None
    except Exception as error:  # damage raises anything in unpicklers and archives
        raise CheckpointError(f"{path}: it was not read: {_cause(path, error)}") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: it holds a {type(content).__name__} and no state_dict.")
    wrappers: Sequence[str] = _WRAPPERS
    if "pytorch-lightning_version" in content:
        content, wrappers = content.get("state_dict"), (*_WRAPPERS, "model.")
    elif isinstance(state := content.get("state"), Mapping) and "model" in state:
        content, wrappers = state["model"], (*_WRAPPERS, "model.")
    else:
        inside = [key for key in _INSIDE if isinstance(content.get(key), Mapping)]
        content = content[inside[0]] if inside else content
    return _flat(content, str(path)), wrappers


def _cause(path: Path, error: Exception) -> str:
    """Return why a file of ``torch.save`` cannot be read, and what to do."""
    with path.open("rb") as file:
        start = file.read(2)
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"it holds a {named[1]}, and hocket makes no objects besides tensors from a file. If you trust it and it holds a "
            "model, save its state_dict alone, and give that file: torch.save(torch.load("
            f"{str(path)!r}, weights_only=False).state_dict(), 'weights.pt')."
        )
    if start == b"PK" or start[:1] == b"\x80":
        return "it is cut off or damaged. Copy or write it again, or give another file."
    return (
        f"it is {'not a file of weights' if start else 'empty'}. Give a .safetensors file, a file that torch.save has "
        "written, or the folder of a checkpoint."
    )


def _check_kind(path: Path) -> None:
    """Raise CheckpointError unless it is a regular file. Links are followed, because other tools' caches consist of links."""
    try:
        safe_files.check(path.stat(), path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}.") from None


def _flat(content: Any, where: str, ours: bool = False) -> dict[str, Tensor]:
    """Return tensors by name, of nested dicts too. Raises CheckpointError if there are no tensors at all.

    Args:
        ours: whether it is a checkpoint of hocket, which may hold sparse and quantized tensors.
    """
    found: dict[str, Tensor] = {}
    length = 0

    def walk(node: Any, path: str) -> None:
        nonlocal length
        if (length := length + len(path)) > _NAMES:
            raise CheckpointError(f"{where}: the names in it take more than {_NAMES:,} characters.")
        if isinstance(node, Tensor):
            if not ours and (node.layout is not torch.strided or node.is_meta or node.is_quantized):
                raise CheckpointError(
                    f"{where}: '{path}' is a sparse, quantized or meta tensor and no weight. Save it dense."
                )
            found[path] = node
        elif isinstance(node, Mapping) and not is_extra(path):
            for key, child in node.items():
                walk(child, f"{path}.{key}" if path else str(key))

    walk(content, "")
    if not found:
        raise CheckpointError(f"{where}: it has no tensors where weights are expected.")
    dense = [each for each in found.values() if each.layout is torch.strided]
    stored = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in dense}
    if (size := sum(each.nbytes for each in dense)) > _EXPANDED + 16 * sum(stored.values()):
        raise CheckpointError(
            f"{where}: its tensors are views that repeat what is stored: {size:,} bytes of {sum(stored.values()):,}."
        )
    return found


def is_extra(name: str) -> bool:
    """Whether it is the name of a module's extra state (``get_extra_state``)."""
    return name.rpartition(".")[2] == "_extra_state"


def _strip(weights: dict[str, Tensor], wrappers: Sequence[str]) -> Weights:
    removed = []
    while prefix := next((each for each in wrappers if all(name.startswith(each) for name in weights)), None):
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        removed.append(prefix)
    made = Weights(weights)
    made.removed = tuple(removed)
    return made
