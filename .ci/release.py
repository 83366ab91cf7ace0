"""Build what a commit releases, check it, rehearse its upload and installation, and upload it to an index that is named.

usage: release.py [--index URL] [--short] [--python VERSION]...

Everything is made in ``dist/``: sdists, wheels, ``SHA256SUMS``, and in ``dist/sbom/`` what each extra installed (CycloneDX).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from check_distributions import check
from local_index import index
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PLUGIN = ROOT / "examples/third_party/hocket-gradient-noise"
#: Installed by pip too, and on further Pythons.
COMMON = ("standard", "vision")
#: What needs no large package besides torch.
LIGHT = "standard,testkit,general,vision,nlp,tensorboard,report,migration"


def run(*command: str | Path, **environment: str) -> str:
    """Run a command with these environment variables besides the present ones, and return its output."""
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))}: exit code {done.returncode}")
    return done.stdout.strip()


def git(*arguments: str | Path) -> str:
    return run("git", "-C", ROOT, *arguments)


def export(folder: Path) -> Path:
    """Write the files of the commit into a folder, and nothing else that is in this checkout."""
    folder.mkdir()
    git("archive", "--output", folder / "source.tar", "HEAD")
    run("tar", "-xf", folder / "source.tar", "-C", folder)
    return folder


def build(projects: Iterable[Path], folder: Path) -> list[Path]:
    """Build the sdist of each project, and the wheel from the sdist, as a function of the commit and the tools' versions."""
    tool = ("uv", "build", "--quiet", "--no-create-gitignore", "--no-build-isolation", "--python", sys.executable)
    for project in projects:
        run(*tool, "--out-dir", folder, project.parent, SOURCE_DATE_EPOCH=git("log", "-1", "--format=%ct"))
    return sorted(folder.iterdir())


def sums(files: list[Path]) -> str:
    """Return what ``sha256sum`` prints."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def make(scratch: Path) -> list[Path]:
    """Build the distributions into ``dist/``, twice, and check them."""
    sources = [export(scratch / name) for name in ("first", "second")]
    shutil.rmtree(DIST, ignore_errors=True)
    files, again = (
        build(sorted(source.glob("packages/*/pyproject.toml")), folder)
        for source, folder in zip(sources, (DIST, scratch / "again"), strict=True)
    )
    if sums(files) != sums(again):
        sys.exit(f"Two builds of one commit differ: compare {DIST} with {scratch / 'again'}")
    machine = [str(scratch), str(ROOT), f"{Path.home()}/"]
    if problems := [line for file in files for line in check(file, (ROOT / "LICENSE").read_bytes(), machine)]:
        sys.exit("\n".join(problems))
    run("twine", "check", "--strict", *files)
    (DIST / "SHA256SUMS").write_text(sums(files))
    print(f"built commit {git('rev-parse', 'HEAD')} twice, with the same bytes: {DIST / 'SHA256SUMS'}", flush=True)
    return files


def install(tool: str, python: str, requirement: str, url: str, folder: Path) -> Path:
    """Install from the index `url` into an environment of its own, and return the environment's interpreter."""
    run("uv", "venv", "--quiet", "--clear", "--python", python, folder)
    interpreter = folder / "bin/python"
    uv = ("uv", "pip", "install", "--quiet", "--python", interpreter)
    if tool == "uv":
        run(*uv, "--index", f"{url}/simple/", requirement)  # a name that this index has is looked up in no other
    else:
        run(*uv, "torch", "torchvision")  # which pip would download again: they are in the cache of uv
        # pip takes the highest version from all indexes that are configured, so it gets one.
        alone = {"PIP_INDEX_URL": f"{url}/simple/", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}
        run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", requirement, **alone)
    return interpreter


def write_sbom(interpreter: Path, installed: dict[str, str], file: Path) -> None:
    """Write the bill of materials of an environment; it must name what Python finds installed."""
    run("cyclonedx-py", "environment", interpreter, "--output-reproducible", "--output-file", file)
    listed = {part["name"]: part["version"] for part in json.loads(file.read_text())["components"]}
    if listed != installed:
        sys.exit(f"{file.name} differs from what is installed: {sorted(listed.items() ^ installed.items())}")


def trials(version: str, short: bool, pythons: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield what is installed: the tool, the interpreter and the requirement."""
    here = sys.executable
    project = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]
    for extra in (*COMMON, LIGHT) if short else (*project["optional-dependencies"], LIGHT):
        yield "uv", here, f"hocket[{extra}]=={version}"
    yield "uv", here, f"hocket=={version}"
    for extra in COMMON[-1:] if short else COMMON:
        yield "pip", here, f"hocket[{extra}]=={version}"
    for python in pythons:
        yield from ((tool, python, f"hocket[{extra}]=={version}") for tool in ("uv", "pip") for extra in COMMON)
    if Version(version).is_prerelease:
        print("A stranger's plug-in asks for hocket>=0.1, which no pre-release satisfies: it is not tried.")
    else:
        yield "uv", here, PLUGIN.name


def rehearse(files: list[Path], scratch: Path, version: str, short: bool, pythons: list[str]) -> None:
    """Upload to an index on this machine, and install from there, each extra into an environment of its own."""
    (store := scratch / "store").mkdir()
    (DIST / "sbom").mkdir()
    with index(store, redirect=False) as ours, index(store, redirect=True) as all_names:
        plugin = build([PLUGIN / "pyproject.toml"], scratch / "plugin")
        upload(ours, [*files, *plugin], TWINE_USERNAME="anybody", TWINE_PASSWORD="")
        for tool, python, requirement in trials(version, short, pythons):
            url = ours if tool == "uv" else all_names
            interpreter = install(tool, python, requirement, url, scratch / "environment")
            found = json.loads(run(interpreter, "-IWignore", ROOT / ".ci/check_installed.py", store).splitlines()[-1])
            brings = f"{len(found['installed'])} distributions; plug-ins that need more: {found['incomplete']}"
            print(f"{tool}, Python {found['python']}, {requirement}: {brings}", flush=True)
            if LIGHT in requirement:
                if found["incomplete"]:
                    sys.exit("With all packages every plug-in must load.")
                run(interpreter, "-IWignore", ROOT / ".ci/smoke.py")
            if tool == "uv" and python == sys.executable:
                name = re.sub(r"[^\w.]+", "-", requirement)
                write_sbom(interpreter, found["installed"], DIST / "sbom" / f"{name}.cdx.json")


def upload(url: str, files: list[Path], **environment: str) -> None:
    """Upload with twine, which takes credentials from TWINE_USERNAME and TWINE_PASSWORD."""
    twine = ("twine", "upload", "--non-interactive", "--disable-progress-bar", "--repository-url", url)
    run(*twine, *files, **environment)


def refuse_unless_ready(url: str) -> None:
    """End before anything is built if this checkout is no release for an index."""
    if changed := git("status", "--porcelain"):
        sys.exit(f"A release is built from a commit; commit or remove first:\n{changed}")
    if "example.org" in (ROOT / "packages/core/pyproject.toml").read_text() and urlsplit(url).hostname != "127.0.0.1":
        sys.exit("The packages' links lead to example.org; RELEASING.md says how to name the repository.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="nox -s release --", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--index", metavar="URL", help="where twine uploads to; without it nothing is uploaded")
    parser.add_argument("--short", action="store_true", help="try a few extras, not all")
    parser.add_argument("--python", action="append", default=[], help="try this Python too (repeatable)")
    options = parser.parse_args()
    if options.index:
        refuse_unless_ready(options.index)
    version = git("show", "HEAD:packages/VERSION.py").split('__version__ = "')[1].split('"')[0]
    with tempfile.TemporaryDirectory() as scratch:
        files = make(Path(scratch))
        rehearse(files, Path(scratch), version, options.short, options.python)
    print("Nothing is signed here: attestations need the identity of .github/workflows/release.yml.")
    if options.index:
        upload(options.index, files)
        print(f"uploaded {len(files)} files to {options.index}")


if __name__ == "__main__":
    main()
