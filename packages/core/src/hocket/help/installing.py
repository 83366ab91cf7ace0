"""How to install more of hocket: from where this one was installed, never by a name that anybody may own in a registry."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import importlib_metadata

from hocket.help.ours import PACKAGES

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
    needed = [word for words in dict.fromkeys(_needed(package, extra)) for word in words]
    if any(word.startswith("./") for word in needed):
        return f"pip install {shlex.join(needed)} in a checkout of hocket"
    return f"pip install {shlex.join(needed)}"


def library(name: str, versions: str = "") -> str:
    """Return the command that installs a package, by its import or distribution name, in versions that hocket's extras need."""
    package = name.replace("_", "-").lower()
    if not package.startswith(_CORE):
        ours = (each for part in PACKAGES.values() for each in _of_extras(part))
        needed = versions or next((each[2] for each in ours if each[0] == name), "")
        return f"pip install {shlex.quote(name + needed)}"
    extra = _extra_of(package)
    if package != _CORE and not any(requirement[3] == extra for requirement in _of_extras(_CORE)):
        return f"pip install FOLDER, which has the source or a wheel of {package}"
    return command("" if package == _CORE else extra)


def _extra_of(package: str) -> str:
    """The name of core's extra for a package: `general` for `hocket-algorithms-general`."""
    return package.removeprefix(f"{_CORE}-").removeprefix("algorithms-")


def _of_extras(package: str) -> list[tuple[str, str | None, str, str]]:
    """Return the requirements for extras: name, its own extra, versions, and the extra."""
    installed = _installed(package)
    matches = filter(None, map(_OF_EXTRA.match, (installed and installed.requires) or []))
    return [(name, inner, versions, extra) for name, inner, versions, extra in (match.groups() for match in matches)]


def _needed(package: str, extra: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each requirement. What the package of an extra needs of ours is omitted if it is installed."""
    requirements = [requirement for requirement in _of_extras(package) if requirement[3] == extra]
    if not requirements:  # the package is missing, or older than this message
        yield _from_source(package, extra)
    for name, inner, versions, _ in requirements:
        if not name.startswith(_CORE):
            yield (name + (f"[{inner}]" if inner else "") + versions.strip(),)
        elif inner or _extra_of(name) == extra or _installed(name) is None:
            yield from _needed(name, inner or "")


def _installed(package: str) -> importlib_metadata.Distribution | None:
    try:
        return importlib_metadata.distribution(package)
    except importlib_metadata.PackageNotFoundError:
        return None


def _from_source(package: str, extra: str) -> tuple[str, ...]:
    folder = package.removeprefix(f"{_CORE}-") if package != _CORE else "core"
    extras = f"[{extra}]" if extra else ""
    origin = json.loads(importlib_metadata.distribution(_CORE).read_text("direct_url.json") or "{}")
    url = urlsplit(origin.get("url", ""))
    beside = Path(unquote(url.path)).parent if url.scheme == "file" else None
    wheels = sorted(beside.glob(f"{package.replace('-', '_')}-*.whl")) if beside is not None else []
    if beside is not None and (beside / folder / "pyproject.toml").is_file():
        option = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        return *option, f"{beside / folder}{extras}"
    if wheels:
        return (f"{wheels[-1]}{extras}",)
    if "vcs_info" in origin:
        vcs, within = origin["vcs_info"], Path(origin.get("subdirectory", "packages/core")).parent
        where = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}#subdirectory={within / folder}"
        return (f"{package}{extras} @ {where}",)
    return (f"./packages/{folder}{extras}",)
