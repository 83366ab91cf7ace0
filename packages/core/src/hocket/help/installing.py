"""How to install more of hocket: from where this one was installed, never by a name that anybody may own in a registry."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import importlib_metadata

_CORE = "hocket"
#: A requirement for an extra: name, its own extra, versions, and the extra.
_OF_EXTRA = re.compile(r"([\w.-]+)(?:\[([\w.-]+)\])?\s*([^;]*);.*\bextra\s*==\s*['\"]([\w.-]+)['\"]")


def command(extra: str, package: str = _CORE) -> str:
    """Return what to type for an extra of hocket or of one of its packages; for an empty one, for the package itself.

    Libraries of others are named. A package of hocket's that is missing is installed from the folder, wheel or repository
    beside which this hocket was.

    Example:
        >>> from hocket.help import installing
        >>> installing.command("optuna")
        "pip install 'optuna>=4.0'"
    """
    needed = [*dict.fromkeys(_needed(package, extra))]
    if any(each.startswith("./") for each in needed):
        return f"pip install {shlex.join(needed)} in a checkout of hocket"
    return f"pip install {shlex.join(needed)}"


def library(name: str, versions: str = "") -> str:
    """Return what to type for a package by its name, as Python imports it or as a checkpoint or requirement states it."""
    package = name.replace("_", "-").lower()
    if not package.startswith(_CORE):
        return f"pip install {shlex.quote(name + versions)}"
    required = importlib_metadata.distribution(_CORE).requires or []
    ours = {_CORE, *(match[1] for each in required if (match := _OF_EXTRA.match(each)))}
    return (
        command("", package) if package in ours else f"pip install FOLDER, which has the source or a wheel of {package}"
    )


def _needed(package: str, extra: str) -> Iterator[str]:
    try:
        required = importlib_metadata.distribution(package).requires or []
    except importlib_metadata.PackageNotFoundError:
        required = []
    found = [match.groups() for each in required if (match := _OF_EXTRA.match(each)) and match[4] == extra]
    if not found:  # the package is missing, or older than this message
        yield from _from_source(package, extra)
    for name, inner, versions, _ in found:
        if name.startswith(_CORE):
            yield from _needed(name, inner or "")
        else:
            yield name + (f"[{inner}]" if inner else "") + versions.strip()


def _from_source(package: str, extra: str) -> Iterator[str]:
    folder = package.removeprefix(f"{_CORE}-") if package != _CORE else "core"
    extras = f"[{extra}]" if extra else ""
    origin = json.loads(importlib_metadata.distribution(_CORE).read_text("direct_url.json") or "{}")
    url = urlsplit(origin.get("url", ""))
    beside = Path(unquote(url.path)).parent if url.scheme == "file" else None
    wheels = sorted(beside.glob(f"{package.replace('-', '_')}-*.whl")) if beside is not None else []
    if beside is not None and (beside / folder / "pyproject.toml").is_file():
        yield from ["-e"] if origin.get("dir_info", {}).get("editable") else []
        yield f"{beside / folder}{extras}"
    elif wheels:
        yield f"{wheels[-1]}{extras}"
    elif "vcs_info" in origin:
        vcs, within = origin["vcs_info"], Path(origin.get("subdirectory", "packages/core")).parent
        yield f"{package}{extras} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}#subdirectory={within / folder}"
    else:
        yield f"./packages/{folder}{extras}"
