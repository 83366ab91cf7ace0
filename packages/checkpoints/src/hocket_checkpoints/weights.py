"""Read weights from other tools' files, load them into a module, and export them. Nothing in the files is executed."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hocket.basics import safe_files
from hocket.basics.plain_data import decode
from hocket.errors import CheckpointError, WrongValue
from hocket_checkpoints import pickles
from hocket_checkpoints.storage import format as formats, manifest as manifests, shards
from hocket_checkpoints.storage.store import Store
from hocket_checkpoints.storage.urls import local_folder
from hocket_checkpoints.weight_differences import Report, some

if TYPE_CHECKING:
    from hocket.state.state import State

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

    def namings(self) -> list[dict[str, Tensor]]:
        """Return the weights without the removed prefixes, with the innermost, and so on to the original names."""
        beginnings = ["".join(self.removed[index:]) for index in range(len(self.removed), -1, -1)]
        return [{beginning + name: tensor for name, tensor in self.items()} for beginning in beginnings]


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Return weights by name, on the CPU.

    Args:
        path: a checkpoint of hocket or its URL (by the model's own names), ``latest`` in a folder of them for the newest, a
            ``.safetensors`` file, a file of ``torch.save`` that holds a ``state_dict`` or is a checkpoint of Lightning or
            Composer, or a folder of Hugging Face, sharded or not.
            Prefixes of all names are removed if they come from a wrapper: ``module.``, ``_orig_mod.``, and for Lightning
            and Composer ``model.``. `load_weights` still knows them, for a module that has such a submodule itself.

    Raises:
        CheckpointError: it is none of these, is damaged, or could be read only by executing code.

    Example:
        >>> import tempfile, torch
        >>> from hocket.checkpoints import read_weights
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.Linear(4, 1).state_dict(), f"{folder}/model.pt")
        ...     weights = read_weights(f"{folder}/model.pt")
        >>> list(weights)
        ['weight', 'bias']
    """
    with local_folder(path, _OF_OURS) as local:
        return _read(local)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        raise CheckpointError(
            f"There is no {path}{where}. Give the path of a file or of a checkpoint's folder, "
            "such as 'model.pt' or 'runs/a/ep3-ba18'." + _if_import_path(str(path))
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: it cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not stat.S_ISDIR(kind):
        return _strip(*_read_file(path))
    if (path / manifests.NAME).exists():
        tree = formats.read(path, only=_OF_OURS)
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
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # damage raises anything in unpicklers and archives
        raise CheckpointError(
            f"{path}: it was not read: it is not a file of torch.save, is damaged, or holds objects besides tensors, which "
            "hocket never makes from a file. If you trust it and it holds a model, save its state_dict alone, and give that "
            f"file: torch.save(torch.load({str(path)!r}, weights_only=False).state_dict(), 'weights.pt'). "
            f"({pickles.reason(error)})"
        ) from None
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
        elif isinstance(node, Mapping) and not _is_extra(path):
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


def _is_extra(name: str) -> bool:
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


def export(source: Path | str, target: Path | str) -> int:
    """Write the weights of anything that `read_weights` reads to one safetensors file; return the number of tensors.

    ``target`` appears complete or not at all. Tied weights are written once per name.

    Example:
        >>> import tempfile, torch
        >>> from hocket.checkpoints import export
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.Linear(4, 1).state_dict(), f"{folder}/model.pt")
        ...     export(f"{folder}/model.pt", f"{folder}/model.safetensors")
        2
    """
    target = Path(target)
    weights = read_weights(source)
    if odd := [name for name, each in weights.items() if each.layout is not torch.strided or each.is_quantized]:
        raise CheckpointError(
            f"{target} was not written: {some(odd, 3)} of {source} {'is' if len(odd) == 1 else 'are'} sparse or quantized, and "
            "safetensors holds dense tensors only. Write torch.save(hocket.checkpoints.read_weights(…), 'weights.pt')."
        )
    if target.exists() and not target.is_file():
        raise CheckpointError(f"{target} is not a regular file, and is not replaced. Give another name.")
    try:
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
        target.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(copies, target, {"format": "pt"})
    except KeyError as error:
        raise CheckpointError(f"{target} was not written: safetensors has no dtype for {error}.") from None
    except Exception as error:  # the library has an exception of its own for a full disk
        raise CheckpointError(f"{target} was not written: {error}.") from error
    return len(copies)


def write_tensors(tensors: dict[str, Tensor], target: Path, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors, each with its own memory, to a safetensors file, which appears complete or not at all.

    safetensors itself would give it mode 600, whatever the umask.
    """
    with safe_files.replacing(target) as file:
        save_file(tensors, file.name, metadata)
        os.chmod(file.name, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        with open(file.name, "rb+") as written:
            os.fsync(written.fileno())


def load_weights(
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool = True,
    ignore: Sequence[str] = (),
    remap: Mapping[str, str] | None = None,
) -> Report:
    """Copy weights into a module, in its dtypes and on its devices, and return a report of the misfits.

    Extra state (``get_extra_state``) is loaded if ``state`` has it, and may be missing unless it is a tensor.

    Args:
        strict: whether anything that does not fit is an error; then nothing at all is loaded.
        ignore: globs of the module's names that are not changed and not reported, such as ``["head.*"]``.
        remap: new names for names in ``state``: full names, or prefixes that end with a dot, as in
            ``{"encoder.": "backbone.", "fc.weight": "head.weight"}`` (an empty prefix matches every name). Full names take
            precedence over prefixes, and long prefixes over short ones.

    Raises:
        CheckpointError: with ``strict``, listing everything that does not fit.
        ValueError: ``remap`` gives two weights one name, or has an entry for no weight.

    Example:
        >>> import torch
        >>> from hocket.checkpoints import load_weights
        >>> backbone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> saved = {"encoder.weight": torch.ones(4, 4), "encoder.bias": torch.zeros(4)}
        >>> report = load_weights(backbone, saved, ignore=["1.*"], remap={"encoder.": "0."})
    """
    chosen, report = _choose(module.state_dict(), state, strict, ignore, remap, type(module).__name__)
    module.load_state_dict(chosen, strict=False)
    return report


def load_into(
    state: State,
    own: Mapping[str, Any],
    weights: Path | str | Mapping[str, Any],
    strict: bool,
    ignore: Sequence[str],
    remap: Mapping[str, str] | None,
) -> Report:
    """Implement `Trainer.load_weights`; ``own`` are the model's weights. Raises the errors of `load_weights`."""
    prefix = state.model_prefix
    given = weights if isinstance(weights, Mapping) else read_weights(weights)
    if not isinstance(weights, Mapping):
        from hocket_checkpoints.algorithm_records import warn_of_surgery

        warn_of_surgery(weights, state)
    chosen, report = _choose(own, given, strict, ignore, remap, type(state.model).__name__)
    renamed = {f"{prefix}{name}": value for name, value in chosen.items()}
    state.bus.load_model_state(state.prepared, {**state.bus.model_state(state.prepared), **renamed})
    return report


def _choose(
    own: Mapping[str, Any],
    state: Mapping[str, Any],
    strict: bool,
    ignore: Sequence[str],
    remap: Mapping[str, str] | None,
    what: str,
) -> tuple[dict[str, Any], Report]:
    """Return the weights of ``state`` that fit a module with the state ``own``, by the module's names, and the misfits."""
    if isinstance(state, Weights) and not remap:
        state = max(state.namings(), key=lambda naming: len(naming.keys() & own.keys()))
    renamed = _renamed(state, remap or {})

    def ignored(name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in ignore)

    given = {name: value for name, value in renamed.items() if not ignored(name)}
    places = {_memory(own[name]) for name in given if name in own}
    # Tied weights may be stored under one of their names only, and extra state that is not a tensor is not a weight.
    wanted = [name for name in own if isinstance(own[name], Tensor) or not _is_extra(name)]
    missing = [name for name in wanted if name not in given and not ignored(name) and _memory(own[name]) not in places]
    unexpected = [name for name in given if name not in own]
    mismatched = [
        (name, tuple(value.shape), tuple(own[name].shape))
        for name, value in given.items()
        if name in own and _shapes_differ(value, own[name])
    ]
    report = Report(tuple(missing), tuple(unexpected), tuple(mismatched))
    if strict and report:
        raise CheckpointError(
            f"The weights do not fit {what}, and nothing was loaded.\n{report}\n"
            "«Pass remap={'old.': 'new.'} for other names, ignore=['head.*'] to leave parts alone, or strict=False¦"
            "Give the configuration that they were trained with, such as config.yaml in the folder of their run»."
        )
    other = {name for name, _, _ in mismatched}
    return {name: value for name, value in given.items() if name in own and name not in other}, report


def _renamed(state: Mapping[str, Any], remap: Mapping[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    used = set()
    beginnings = sorted((old for old in remap if not old or old.endswith(".")), key=len, reverse=True)
    for name, value in state.items():
        old = name if name in remap else next((each for each in beginnings if name.startswith(each)), None)
        new = name if old is None else remap[old] + name[len(old) :]
        used.add(old)
        if new in made:
            raise WrongValue(f"remap gives '{new}' to two weights, one of them '{name}'.")
        made[new] = value
    if unused := sorted(set(remap) - used):
        raise WrongValue(f"remap has {some(unused)}, which no name equals or begins with; prefixes end with a dot.")
    return made


def _memory(value: Any) -> Any:
    """Return a key that is equal only for entries of a state that are the same tensor."""
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value) or type(value) not in (Tensor, nn.Parameter):
        return id(value)
    if value.layout is not torch.strided:
        return id(value)
    return (
        (value.device, value.data_ptr(), value.shape, value.stride())
        if value.numel() and not value.is_meta
        else id(value)
    )


def _shapes_differ(given: Any, own: Any) -> bool:
    if not isinstance(given, Tensor) or not isinstance(own, Tensor) or nn.parameter.is_lazy(own):
        return False
    return given.shape != own.shape
