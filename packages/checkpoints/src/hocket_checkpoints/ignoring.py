"""Ignore parts of a checkpoint: replace them by the Trainer's own state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from hocket.errors import WrongType, WrongValue


def ignoring(tree: Mapping[str, Any], own: Mapping[str, Any], globs: Sequence[str]) -> dict[str, Any]:
    """Return ``tree`` with the parts whose dotted path matches a glob replaced by those of ``own``, or removed if it has none.

    Ignored plug-ins, ``plugins.KIND.NAME``, need not be attached.

    Args:
        tree: a tree of `hocket_checkpoints.content`.
        own: the tree of the Trainer that loads it.

    Raises ValueError for a glob that matches nothing in either, and the error of `check_globs`.
    """
    check_globs(globs)
    used: set[str] = set()

    def ignored(path: str) -> bool:
        found = [glob for glob in globs if fnmatchcase(path, glob)]
        used.update(found)
        return bool(found)

    def merge(saved: Mapping[str, Any], mine: Mapping[str, Any], path: str) -> dict[str, Any]:
        made = {}
        for key in [*saved, *(key for key in mine if key not in saved)]:
            if ignored(below := f"{path}{key}"):
                if key in mine:
                    made[key] = mine[key]
            elif key in saved:
                made[key] = inside(saved[key], mine.get(key), f"{below}.", ranks=below == "ranks")
        return made

    def inside(value: Any, other: Any, path: str, ranks: bool) -> Any:
        if isinstance(value, Mapping):
            return merge(value, other if isinstance(other, Mapping) else {}, path)
        if not ranks:
            return value
        states = [*(other or ()), *({} for _ in value)]  # the world size may differ
        return [
            merge(each, mine, f"{path}{rank}.") for rank, (each, mine) in enumerate(zip(value, states, strict=False))
        ]

    def attached(of: Mapping[str, Any], wanted: bool) -> list[Any]:
        return [each for each in of["attached"] if ignored(f"plugins.{each['kind']}.{each['name']}") is wanted]

    made = merge(tree, own, "")
    made["attached"] = attached(tree, False) + attached(own, True)
    if "configuration" in made:  # the hyperparameters go with their optimizer
        settings, mine = made["configuration"], own["configuration"]["optimizers"]
        keys = [name for name in mine if any(map(ignored, ("optimizers", *_paths_to_groups(name.split(".")[1]))))]
        made["configuration"] = {**settings, "optimizers": settings["optimizers"] | {key: mine[key] for key in keys}}
    if unused := [glob for glob in globs if glob not in used]:
        raise WrongValue(
            f"«ignore={unused!r}» matches nothing. Give globs of paths as `hocket checkpoint inspect` shows them, such as "
            "'model.head.*', 'optimizers.*' or 'plugins.algorithms.ema'."
        )
    return made


def check_globs(globs: Sequence[str]) -> None:
    """Raise TypeError for a text, whose letters would be the globs, for what can be read once, and for others than texts."""
    if isinstance(globs, str) or not isinstance(globs, Collection) or not all(isinstance(each, str) for each in globs):
        example = globs if isinstance(globs, str) and globs else "head.*"
        raise WrongType(f"«ignore={globs!r}» is not a list of patterns. Give one: «ignore=[{example!r}]».")


def _paths_to_groups(number: str) -> Sequence[str]:
    return f"optimizers.{number}", f"optimizers.{number}.state", f"optimizers.{number}.state.param_groups"
