"""Recorded configurations: ``config.yaml`` in the folder of a run, also in its checkpoints, from which the run is repeated.

The file has every key, so that later defaults do not change it, and under ``x-hocket``, which is ignored when it is read, the
file, overrides, versions and modules that it was made from.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics import safe_files
from hocket.basics.run_folder import is_url
from hocket_checkpoints.ranking import BEST
from hocket_checkpoints.storage.manifest import LATEST
from hocket_cli.document import ConfigError, Node, dump, parse
from hocket_cli.module_origins import CHECKSUM, digest, folders, paths

if TYPE_CHECKING:
    from hocket.state.state import State

#: The file's name, and the key below which it says what it was made from.
NAME, KEY = "config.yaml", "x-hocket"
#: The variable with overrides, separated as in a shell: ``HOCKET_OVERRIDES="duration=1ep optimizer.adamw.lr=0.1"``.
VARIABLE = "HOCKET_OVERRIDES"
#: Under which `made_of` returns the keys whose values no run records.
MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration as a command reads it."""

    document: Node
    #: The file, or for ``--from`` the file that the recorded run was made from; and the place of that run.
    file: str | None
    repeats: str | None
    #: Overrides from the environment, and from the command line.
    environment: list[str]
    overrides: list[str]
    #: What a recorded configuration was made from; empty for any other.
    made: Mapping[str, Any]

    def announce(self) -> None:
        """Say on one rank, in a line each, what the environment overrides, and what of a recorded configuration is ignored."""
        if os.environ.get("RANK", "0") != "0":
            return
        if self.environment:
            print(f"hocket: {VARIABLE} overrides {', '.join(self.environment)}.", file=sys.stderr, flush=True)
        if wrong := self.made.get(MALFORMED):
            print(
                f"hocket: {KEY} is what a run records, and its {', '.join(wrong)} cannot be. It is ignored there.",
                file=sys.stderr,
            )


def about(source: Source, state: State, distributions: Mapping[str, str]) -> dict[str, Any]:
    """Return what a run is made from: its file and overrides, and what may change its numbers."""
    import torch

    found: dict[str, Any] = {"file": source.file, "sha256": digest(source.file)}
    found |= {"repeats": source.repeats} if source.repeats else {}
    found |= {"environment": source.environment} if source.environment else {}
    return found | {
        "overrides": source.overrides, "run": state.run.id, "device": state.device.type, "ranks": state.strategy.world_size,
        "threads": torch.get_num_threads(), "versions": versions(distributions), "modules": modules(source.document),
        "sources": sources(source, state.folder.path),
    }  # fmt: skip


def text(resolved: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """Return the text of a run's ``config.yaml``."""
    head = "# Every key of this run. `hocket train --from FOLDER [key=value …]` repeats it, with changes.\n"
    return head + dump(dict(resolved)) + dump({KEY: dict(made)})


def versions(distributions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of python, torch and the given distributions."""
    import torch

    return {"python": platform.python_version(), "torch": str(torch.__version__), **dict(sorted(distributions.items()))}


def modules(document: Node) -> dict[str, str]:
    """Return the version of each installed module that a configuration names, and a checksum of each other one."""
    found = {}
    for path in paths(document):
        name = path.partition(":")[0]
        while name and name not in sys.modules:
            name = name.rpartition(".")[0]
        top = sys.modules.get(name.partition(".")[0])
        file = getattr(sys.modules.get(name), "__file__", None)
        if version := getattr(top, "__version__", None):
            found[name.partition(".")[0]] = str(version)
        elif file and (checksum := digest(file)):
            found[name] = checksum
    return {name: found[name] for name in sorted(found)}


def sources(source: Source, base: Path) -> dict[str, list[str]]:
    """Return the paths of the user's modules that a configuration names: relative to the folder of the run, and absolute."""
    found, own = {}, folders(source)
    for name in sorted({re.split("[.:]", path)[0] for path in paths(source.document)}):
        module = sys.modules.get(name)
        file = next(iter(getattr(module, "__path__", ())), getattr(module, "__file__", None))
        if file and (folder := os.path.realpath(os.path.dirname(file))) in own:
            file = os.path.join(folder, os.path.basename(file))
            found[name] = [os.path.relpath(file, os.path.realpath(base)), file]
    return found


def continued(file: Path, now: str) -> str:
    """Return the text of a run's ``config.yaml`` with the keys that changed since the run wrote ``file``, before it resumed.

    They are those of all its parts, so that a repetition can say that it will differ.
    """
    try:
        before, after = (parse(text, str(file)) for text in (safe_files.text(file, within=file.parent), now))
    except (OSError, ConfigError, UnicodeDecodeError):
        return now
    was, made = made_of(before, None), after.value.pop(KEY).plain()
    if was.get("run") != made["run"]:
        return now
    then, values = before.plain(), after.plain()
    differ = {str(key) for key in then.keys() | values.keys() if then.get(key) != values.get(key)}
    changed = sorted({*was.get("changed", ()), *differ - {"resume", "run_name"}})
    return text(values, {**made, "changed": changed}) if changed else now


def write(folder: Path, text: str) -> None:
    """Write ``config.yaml`` into the folder of a run, atomically."""
    safe_files.replace(folder / NAME, text)


# --- repeat a run


def read(place: str) -> tuple[Node, dict[str, Any], str]:
    """Return the configuration of a run, what it was made from, and the file or checkpoint that it is read from.

    ``place``: the folder of the run, a checkpoint or a folder of them, also by URL. Raises ConfigError if none is found.
    """
    file = Path(place)
    file = file / NAME if file.is_dir() else file
    if file.exists() and not file.is_dir() and file.name not in (LATEST, BEST):
        where, text = str(file), _of_file(file, place)
    else:
        where, text = _of_checkpoint(place)
    root = parse(text, where)
    if not (made := made_of(root, file.parent if file.is_file() else None)):
        raise ConfigError(
            place,
            f"{where} was not recorded by a run, which has {KEY} in it. Write `hocket train {shlex.quote(where)}`, or give "
            "the folder of a run, such as runs/a, or a checkpoint.",
        )
    return root, made, where


def made_of(root: Node, base: Path | None) -> dict[str, Any]:
    """Remove what a configuration was made from, and return it, with the paths of its modules below ``base``; or empty.

    The relative paths are dropped without a base, as for the configuration in a checkpoint. So is what no run records, since
    anybody can write a file; `MALFORMED` has its keys.
    """
    given = root.value.pop(KEY, Node(None, "", "")).plain()
    if not isinstance(given, dict):
        return {}
    made = {key: clean for key, shape in _SHAPES.items() if (clean := _clean(given.get(key), shape)) is not None}
    wrong = [key for key in _SHAPES if key not in made and given.get(key) is not None]
    if not made:
        return {}
    known = made.setdefault("modules", {})
    if "sources" not in made:  # of an older version; a checksum may be that of a user's file
        made["sources"] = {name: [] for name, version in known.items() if len(version) == CHECKSUM}
    inside = os.path.realpath(base or "")
    for name, places in made["sources"].items():
        made["sources"][name] = [
            os.path.normpath(os.path.join(inside, each)) for each in places if base or os.path.isabs(each)
        ]
    return {**made, MALFORMED: wrong} if wrong else made


#: What a run records of itself, by the types of values.
_SHAPES: dict[str, Any] = {
    "file": str, "sha256": str, "repeats": str, "environment": list, "overrides": list, "changed": list, "run": str,
    "device": str, "ranks": int, "threads": int, "versions": dict, "modules": dict, "sources": dict[str, list],
}  # fmt: skip


def _clean(value: Any, shape: Any) -> Any:
    """Return a value as a run records it, or None if no run does. Names of modules are of one part."""
    if shape is int:
        return value if type(value) is int else None
    if shape is str:
        is_text = isinstance(value, str | int | float) and "\0" not in str(value)
        return str(value) if is_text else None
    if shape is list:
        texts = [_clean(each, str) for each in value] if isinstance(value, list) else [None]
        return None if None in texts else texts
    if not isinstance(value, dict):
        return None
    of_modules = shape is _SHAPES["sources"]
    found = {str(key): _clean(each, list if of_modules else str) for key, each in value.items()}
    if None in found.values() or (of_modules and not all(map(str.isidentifier, found))):
        return None
    return found


def _of_file(file: Path, place: str) -> str:
    """Return the text of a file that may be a recorded configuration. Raises ConfigError for any other file of a run."""
    folder, text = file.parent, None
    if file.suffix in (".yaml", ".yml"):
        try:
            text = safe_files.text(file, within=None if str(file) == place else folder)
        except UnicodeDecodeError:
            pass
        except OSError as error:
            raise ConfigError(place, f"{file}: {error.strerror}. Give the folder of another run.") from None
    if text is None:
        found = (folder / NAME).is_file()
        write = f"Give {shlex.quote(str(folder))}" if found else "Give the folder of a run, such as runs/a"
        raise ConfigError(place, f"It is a file, and no configuration. {write}, or give a checkpoint.")
    return text


def _of_checkpoint(place: str) -> tuple[str, str]:
    """Return a checkpoint and the text that it records."""
    from hocket.errors import CheckpointError
    from hocket_checkpoints.storage import format as formats
    from hocket_checkpoints.storage.urls import local_folder
    from hocket_cli.weights import newest

    try:
        if (where := newest(place)) is None:
            raise ConfigError(
                place, f"It does not exist. Give the folder of a run, such as runs/a, or {_a_checkpoint(place)}."
            )
        with local_folder(where, ["config"]) as folder:
            found = formats.structure(folder, ["config"])
    except (CheckpointError, ImportError, ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            place,
            f"It has no {NAME}, which `hocket train` writes into the folder of each run, and is no checkpoint: {error}",
        ) from None
    text = found.get("config") if isinstance(found, dict) else None
    if isinstance(text, str):
        return where, text
    above = next((each / NAME for each in list(Path(where).parents)[:2] if (each / NAME).is_file()), None)
    if above is not None and not is_url(where):  # a checkpoint of weights only
        return str(above), _of_file(above, place)
    raise ConfigError(
        place,
        "This checkpoint records no configuration: its run was started in Python, or by an older version. Run that "
        "program, or `hocket train` with the file of that time.",
    )


def _a_checkpoint(place: str) -> str:
    """Return the newest checkpoint beside a path that does not exist, or words for one."""
    from hocket_checkpoints.storage.store import Store

    folder = os.path.dirname(place) or "."
    names = [] if is_url(place) else Store(folder).names()
    return f"a checkpoint, such as {folder}/{names[-1]}" if names else "a checkpoint"


def as_new_run(document: Node, made: Mapping[str, Any], place: str) -> None:
    """Give a recorded configuration the name of a new run, which does not resume: with -2 at the end, -3 and so on.

    Only a number that an earlier repetition appended is replaced; any other is a part of the name, as in ``resnet-50``.
    """
    values, where = document.value, f"--from {place}"
    name = values["run_name"].value if "run_name" in values else None
    name = str(name or Path(place).resolve().name)
    given = [str(each) for kind in ("environment", "overrides") for each in made.get(kind) or ()]
    if made.get("repeats") and not any(each.startswith("run_name=") for each in given):
        name = re.sub(r"-\d+$", "", name)
    folder = folder_of(document)
    unused = next(new for count in itertools.count(2) if not os.path.lexists(folder / (new := f"{name}-{count}")))
    values["run_name"] = Node(unused, where, where)
    values["resume"] = Node(None, where, where)


def folder_of(document: Node) -> Path:
    """Return the folder of runs."""
    return Path(str(document.value["folder"].plain() if "folder" in document.value else "runs"))


def own_checkpoints(document: Node, where: str) -> None:
    """Let checkpoints go into the folder of a run that has a name."""
    checkpoints = document.value.get("checkpoints")
    if checkpoints is None or checkpoints.value is None:
        return
    name = document.value["run_name"].value
    target = Node((folder_of(document) / str(name) / "checkpoints").as_posix(), where, where)
    inside = checkpoints.value
    if isinstance(inside, dict) and "init_args" in inside:
        inside = inside["init_args"].value
    elif isinstance(inside, dict) and len(inside) == 1 and ":" in next(iter(inside)):
        (inside,) = (each.value for each in inside.values())
    if isinstance(inside, dict) and "folder" in inside:
        inside["folder"] = target
    else:
        document.value["checkpoints"] = target


def changed_modules(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the modules that are no longer as a configuration recorded them."""
    then, here = (made.get("modules") or {}), now["modules"]
    return [name for name, was in then.items() if len(str(was)) == CHECKSUM and here.get(name, was) != was]


def differences(made: Mapping[str, Any], now: Mapping[str, Any], seed: int | None) -> str:
    """Return, as the end of a sentence, what may keep a repeated run from being bitwise identical; or empty."""
    found = []
    for kind in ("versions", "modules"):
        then, here = dict(made.get(kind) or {}), dict(now.get(kind) or {})
        for name in then:
            was, is_now = then[name], here.get(name, "not used")
            if was != is_now:
                is_text = len(str(was)) == CHECKSUM
                found.append(f"{name} has changed" if is_text else f"{name} was {was}, is {is_now}")
    for name in ("device", "ranks", "threads"):
        if name in made and made[name] != now.get(name):
            found.append(f"{name} was {made[name]}, is {now.get(name)}")
    file = made.get("file")
    if isinstance(file, str) and digest(file) not in (None, made.get("sha256")):  # None from another working folder
        found.append(f"{file} has changed since, and the recorded configuration is used")
    if changed := made.get("changed"):
        found.append(
            f"{', '.join(map(str, changed))} changed when the run was resumed, and the last values are used throughout"
        )
    if seed is None:
        found.append("it has no seed= and draws from the global random numbers, which are not recorded")
    return f", perhaps not bit for bit: {'; '.join(found)}" if found else ""
