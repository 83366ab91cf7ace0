"""In an environment: fail unless hocket's files are those of the wheels in a folder, and its plug-ins load; print what is installed.

usage: check_installed.py WHEELS
"""

import json
import platform
import sys
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile


def check(distribution: Distribution, wheels: Path) -> None:
    """Compare the hashes that the installer recorded with those of the wheel, and load all plug-ins."""
    stem = f"{distribution.name.replace('-', '_')}-{distribution.version}"
    with ZipFile(wheels / f"{stem}-py3-none-any.whl") as wheel:
        built = set(wheel.read(f"{stem}.dist-info/RECORD").decode().splitlines())
    recorded = set((distribution.read_text("RECORD") or "").splitlines())
    if absent := {line for line in built - recorded if not line.startswith(f"{stem}.dist-info/RECORD,")}:
        sys.exit(f"{distribution.name} differs from the wheel in {wheels}: {sorted(absent)}")
    for entry_point in distribution.entry_points:
        if entry_point.group != "hocket.v1.commands" or find_spec("hocket_cli"):  # which runs them
            entry_point.load()


def main(wheels: str) -> None:
    installed = {distribution.name: distribution for distribution in distributions()}
    for name, distribution in installed.items():
        if name.startswith("hocket"):
            check(distribution, Path(wheels))
    versions = {name: distribution.version for name, distribution in installed.items()}
    print(json.dumps({"python": platform.python_version(), "installed": versions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
