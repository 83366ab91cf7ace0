"""Load weights into a module, and export them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hocket.basics import safe_files
from hocket.errors import CheckpointError, WrongType, WrongValue
from hocket.help import warn
from hocket.state import conversions
from hocket_checkpoints.ignoring import check_globs
from hocket_checkpoints.weight_differences import Report, mismatched, own_model, some, suggested_remap
from hocket_checkpoints.weight_files import Weights, is_extra, read_weights

if TYPE_CHECKING:
    from hocket.state.state import State


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
    state: Mapping[str, Any] | Path | str,
    strict: bool = True,
    ignore: Sequence[str] = (),
    remap: Mapping[str, str] | None = None,
) -> Report:
    """Copy weights into a module, in its dtypes and on its devices, and return a report of the misfits.

    It warns of loaded weights that are NaN, and if nothing was loaded.
    Extra state (``get_extra_state``) is loaded if ``state`` has it, and may be missing unless it is a tensor.

    Args:
        state: tensors by name, or a file or folder as `read_weights` reads it.
        strict: whether a missing or unexpected name or another shape is an error; then nothing at all is loaded.
        ignore: globs of the module's names that are not changed and not reported, such as ``["head.*"]``.
        remap: new names for names in ``state``: full names, or prefixes that end with a dot, as in
            ``{"encoder.": "backbone.", "fc.weight": "head.weight"}`` (an empty prefix matches every name). Full names take
            precedence over prefixes, and long prefixes over short ones.

    Raises:
        CheckpointError: with ``strict``, listing everything that does not fit; always for a dtype that has lost values, such as
            integers for floating-point weights (another precision has not).
        ValueError: ``remap`` gives two weights one name, or has an entry for no weight; ``ignore`` has a glob for none.
        TypeError: ``ignore`` is a text, a weight is not a tensor, or another argument is something else, such as ``state`` in
            the place of ``module``.

    Example:
        >>> import torch
        >>> from hocket.checkpoints import load_weights
        >>> backbone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> saved = {"encoder.weight": torch.ones(4, 4), "encoder.bias": torch.zeros(4)}
        >>> report = load_weights(backbone, saved, ignore=["1.*"], remap={"encoder.": "0."})
    """
    if not isinstance(module, nn.Module) or not isinstance(state, Mapping | Path | str):
        raise WrongType(
            f"load_weights({type(module).__name__}, {type(state).__name__}): it takes a torch.nn.Module, and then its weights: "
            "a file or folder, or tensors by name. Write load_weights(model, 'model.pt') or load_weights(model, state_dict)."
        )
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
    if not isinstance(weights, Mapping):
        from hocket_checkpoints.algorithm_records import warn_of_surgery

        warn_of_surgery(weights, state)
    chosen, report = _choose(own, weights, strict, ignore, remap, type(state.model).__name__)
    if (resumed := state.identity.resumed_from) is not None:  # a script that loads initial weights was started again
        warn(
            f"These weights are not loaded, because this run was resumed from {resumed} and goes on with its weights. To begin "
            "a run with other weights, write «resume=None»."
        )
        return report
    renamed = {f"{prefix}{name}": value for name, value in chosen.items()}
    state.bus.load_model_state(state.prepared, {**state.bus.model_state(state.prepared), **renamed})
    return report


def _choose(
    own: Mapping[str, Any],
    state: Mapping[str, Any] | Path | str,
    strict: bool,
    ignore: Sequence[str],
    remap: Mapping[str, str] | None,
    what: str,
) -> tuple[dict[str, Any], Report]:
    """Return the weights of ``state`` that fit a module with the state ``own``, by the module's names, and the misfits."""
    strict = conversions.switch("strict")(strict)
    place, removed, state = state, "", state if isinstance(state, Mapping) else read_weights(state)
    if isinstance(state, Weights) and not remap:
        removed, state = max(state.namings().items(), key=lambda naming: len(naming[1].keys() & own.keys()))
    renamed = _renamed(state, remap or {})
    check_globs(ignore)
    names = {**own, **renamed}
    if unused := [glob for glob in ignore if not any(fnmatchcase(name, glob) for name in names)]:
        raise WrongValue(
            f"«ignore={unused!r}» matches no weight. Give globs of the names of {what}: {some([*own], 6)}."
        )

    def ignored(name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in ignore)

    given = {name: value for name, value in renamed.items() if not ignored(name)}
    places = {_memory(own[name]) for name in given if name in own}
    # Tied weights may be stored under one of their names only, and extra state that is not a tensor is not a weight.
    wanted = [name for name in own if isinstance(own[name], Tensor) or not is_extra(name)]
    missing = [name for name in wanted if name not in given and not ignored(name) and _memory(own[name]) not in places]
    unexpected = [name for name in given if name not in own]
    report = Report(tuple(missing), tuple(unexpected), mismatched(given, own))
    if strict and report:
        remap, fit = suggested_remap(report, given, own)
        write = f"remap={remap!r}, by which {fit} of them fit" if fit else "remap={'old.': 'new.'} for other names"
        raise CheckpointError(
            f"The weights do not fit {what}, and nothing was loaded.\n{report}\n"
            f"«Pass {write}, ignore=['head.*'] to leave parts alone, or strict=False¦{own_model(place)}»."
        )
    other = {name for name, _, _ in report.mismatched}
    chosen = {name: value for name, value in given.items() if name in own and name not in other}
    for name, value in chosen.items():
        _check_values(name, value, own[name])
    if own and not chosen:
        warn(
            f"No weight of {what} was loaded: it has {some([*own], 3)}; given were {some([*state], 3) or 'none'}. "
            "Give remap= for other names, or a narrower ignore=."
        )
    if damaged := [name for name, value in chosen.items() if _has_nan(value)]:
        warn(
            f"The weights that were loaded into {what} are NaN in {some(damaged, 6)}. Load those of an earlier checkpoint."
        )
    return chosen, replace(report, loaded=tuple(chosen), ignored=tuple(filter(ignored, own)), removed=removed)


def _check_values(name: str, given: Any, own: Any) -> None:
    """Raise TypeError for a weight that is not a tensor, and CheckpointError for one whose dtype is of another kind."""
    if not isinstance(own, Tensor):
        return
    if not isinstance(given, Tensor):
        raise WrongType(f"The weight {name} is a {type(given).__name__}. Give a tensor: torch.tensor(…).")
    kinds = [each.dtype.is_floating_point + 2 * each.dtype.is_complex for each in (given, own)]  # 0: integers
    whole = kinds == [1, 0] and (given.is_meta or torch.equal(given, given.trunc()))
    if kinds[0] != kinds[1] and kinds != [1, 2] and not whole:
        raise CheckpointError(
            f"The weight {name} has the dtype {str(given.dtype)[6:]}, and that of the module has {str(own.dtype)[6:]}: numbers "
            f"of another kind, so values are lost. Nothing was loaded. Give {str(own.dtype)[6:]}, or ignore=[{name!r}]."
        )


def _renamed(state: Mapping[str, Any], remap: object) -> dict[str, Any]:
    if not isinstance(remap, Mapping) or not all(isinstance(each, str) for pair in remap.items() for each in pair):
        raise WrongType(f"«remap={remap!r}» is not a dict of names. Write «remap={{'old.': 'new.'}}».")
    if odd := [name for name in state if not isinstance(name, str)]:
        raise WrongType(f"The weights have the name {odd[0]!r}, which is not text. Give a state_dict.")
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
        raise WrongValue(
            f"remap has {some(unused)}, which no name equals or begins with; prefixes end with a dot. The "
            f"names are {some([*state], 6)}."
        )
    return made


def _memory(value: Any) -> Any:
    """Return a key that is equal only for entries of a state that are the same tensor."""
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value) or type(value) not in (Tensor, nn.Parameter):
        return id(value)
    if value.layout is not torch.strided or not value.numel() or value.is_meta:
        return id(value)
    return value.device, value.data_ptr(), value.shape, value.stride()


def _has_nan(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    return dense and value.is_floating_point() and value.dtype.itemsize > 1 and bool(value.isnan().any())
