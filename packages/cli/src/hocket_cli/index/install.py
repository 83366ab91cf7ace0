"""``hocket plugins install``: show what would be installed, ask, and install exactly that, by pip or uv."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from hocket.basics.safe_files import printable
from hocket.help import installing
from hocket.plugins import KINDS, PluginError, registry
from hocket_cli import own_names
from hocket_cli.index import simple, wheels

#: Nothing of a distribution may run before the user has agreed, as it does where a source distribution is built.
_WHEELS = ("--only-binary", ":all:")
#: What pip and uv say of a name of which the index has nothing that fits.
_ABSENT = re.compile(r"satisfies the requirement ([\w.-]+)\S* \(from versions: none\)|Because ([\w.-]+) was not found")


def run(args: argparse.Namespace) -> int:
    """Install distributions into the environment of this process. Raises PluginError if that is refused or fails."""
    if args.index:
        simple.check(args.index, "--index")
    wanted = [_requirement(name, args.index) for name in args.names]
    _refuse_ours(each.name for each in wanted)
    index = ["--index-url", args.index] if args.index else []
    pinned = _plan([*map(str, wanted), *index])
    if not pinned:
        print("All of it is installed already.")
        return 0
    _refuse_ours(each.partition("==")[0] for each in pinned)
    with tempfile.TemporaryDirectory() as folder:
        _call("--target", folder, "--no-deps", *_WHEELS, *index, *pinned)
        for line in _described(wheels.of_folder(Path(folder)), {canonicalize_name(each.name) for each in wanted}):
            print(printable(line))
    if not args.yes and not _agreed():
        print("Nothing was installed.")
        return 1
    _call("--no-deps", *_WHEELS, *index, *pinned)
    print(f"Installed {', '.join(pinned)}. `hocket plugins doctor` imports them, each in a process of its own.")
    return 0


def _requirement(text: str, index: str | None) -> Requirement:
    """Return what to install for the name of a distribution, with or without versions, or of a plug-in of the index."""
    if Path(text).exists() and (os.sep in text or text.endswith((".whl", ".gz"))):
        raise PluginError(f"{text} is a file or folder, and not in an index. Type: pip install {shlex.quote(text)}")
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise PluginError(
            f"{text!r} is not the name of a distribution. Write hocket-NAME, or hocket-NAME==1.0."
        ) from error
    if requirement.url:
        raise PluginError(f"{text!r} is an address. Write the name of a distribution, with --index URL if need be.")
    if index is None:
        _refuse_plugins(requirement.name)
    if index is None or own_names.reserved(requirement.name) or simple.has(index, requirement.name):
        return requirement
    providers = [
        each.name for each in simple.plugins(index) if requirement.name in {plugin.name for plugin in each.plugins}
    ]
    if len(providers) != 1:
        found = (
            f"several distributions: write one of {', '.join(providers)}" if providers else "none of its distributions"
        )
        raise PluginError(
            f"'{requirement.name}' is a plug-in of {found}. `hocket plugins index --from {index}` lists all."
        )
    return Requirement(text.replace(requirement.name, providers[0], 1))


def _refuse_ours(names: Iterable[str]) -> None:
    for name in map(canonicalize_name, names):
        if reason := own_names.reserved(name):
            own = own_names.meant(name)
            write = f"Type: {installing.library(own)}" if own else "Choose another distribution."
            raise PluginError(
                f"{name} {reason}. These names are not registered in public indexes yet: there it could be anybody's. {write}"
            )


def _refuse_plugins(name: str) -> None:
    """Refuse the name of an installed plug-in or of one of hocket's: in an index it could be anything."""
    for kind in KINDS:
        what = f"'{name}' is a plug-in, {registry.singular(kind)} '{name}', and not a distribution"
        if entry := next((each for each in registry.entries(kind) if each.name == name), None):
            raise PluginError(f"{what}: {entry.dist} has it, and is installed. Type: hocket plugins info {name}")
        if extra := registry.known().get(kind, {}).get(name):
            raise PluginError(f"{what}: a package of hocket's has it. Type: {installing.command(extra)}")


def _plan(arguments: list[str]) -> list[str]:
    """Return the distributions that would be installed, as ``name==version``."""
    if _tool()[0] == "pip":
        report = _call("--quiet", "--dry-run", "--report", "-", *_WHEELS, *arguments)
        metadata = [each["metadata"] for each in json.loads(report)["install"]]
        return [f"{canonicalize_name(each['name'])}=={each['version']}" for each in metadata]
    return re.findall(r"^ \+ ([\w.-]+==[^\s(]+)", _call("--dry-run", *_WHEELS, *arguments), re.MULTILINE)


def _tool() -> tuple[str, list[str]]:
    """Return pip, or uv where this environment has no pip, and its command. Raises PluginError."""
    for name in ("pip", "uv"):
        if importlib.util.find_spec(name):
            return name, [sys.executable, "-m", name]
    if program := shutil.which("uv"):
        return "uv", [program]
    raise PluginError("There is neither pip nor uv to install with. Type: python -m ensurepip")


def _call(*arguments: str) -> str:
    """Run pip or uv, and return what it prints. Raises PluginError with its errors."""
    name, command = _tool()
    if name == "uv":
        options = ["pip", "install", "--python", sys.executable, "--color", "never"]
    else:
        options = ["install", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run([*command, *options, *arguments], capture_output=True, text=True, check=False)
    if done.returncode and (found := _ABSENT.search(done.stderr)):
        absent = found[1] or found[2]
        raise PluginError(
            f"There is no wheel of '{absent}' for this Python in the index that {name} asks. Write the name of a distribution "
            "that its author has published, such as hocket-NAME, and for another index add --index URL. The plug-ins that are "
            "installed already are in `hocket plugins list`."
        )
    if done.returncode:
        raise PluginError(f"{name} cannot install this: {' '.join(done.stderr.split())}")
    return done.stderr + done.stdout if name == "uv" else done.stdout


def _described(found: list[wheels.About], wanted: set[str]) -> list[str]:
    lines = []
    for each in sorted(found, key=lambda each: (each.name not in wanted, each.name)):
        kind = "" if each.name in wanted else "brings "
        lines.append(
            f"{kind}{each.name} {each.version} by {each.author or 'an author that it does not name'}: {each.summary}"
        )
        if each.name in wanted:
            lines += [f"  {plugin.kind}/{plugin.name} ({', '.join(plugin.apis)})" for plugin in each.plugins]
            lines += [] if each.plugins else ["  no plug-ins for hocket"]
            lines += ["  It is not of hocket's authors, whatever its name."] if each.name.startswith("hocket-") else []
    return lines


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise PluginError("Nothing was installed: nobody can be asked without a terminal. Add --yes to install this.")
    return input(f"Install into {sys.prefix}? [y/N] ").strip().lower() in ("y", "yes")
