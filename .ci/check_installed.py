"""Fail unless the installed files of hocket are those of the wheels in a folder, and each plug-in loads or says what it misses.

usage: check_installed.py WHEELS
"""

import json
import platform
import sys
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from hocket.errors import MissingPackage


def check(distribution: Distribution, wheels: Path) -> list[str]:
    """Compare the hashes that the installer recorded with the wheel's; load all plug-ins, return those that miss a package."""
    stem = f"{distribution.name.replace('-', '_')}-{distribution.version}"
    with ZipFile(wheels / f"{stem}-py3-none-any.whl") as wheel:
        built = set(wheel.read(f"{stem}.dist-info/RECORD").decode().splitlines())
    recorded = set((distribution.read_text("RECORD") or "").splitlines())
    if absent := {line for line in built - recorded if not line.startswith(f"{stem}.dist-info/RECORD,")}:
        sys.exit(f"{distribution.name} differs from the wheel in {wheels}: {sorted(absent)}")
    incomplete = []
    for entry_point in distribution.entry_points:
        if entry_point.group == "hocket.v1.commands" and not find_spec("hocket_cli"):  # which runs them
            continue
        try:
            entry_point.load()
        except MissingPackage:
            incomplete.append(entry_point.name)
    return incomplete


def main(wheels: str) -> None:
    installed = {distribution.name: distribution for distribution in distributions()}
    ours = [distribution for name, distribution in installed.items() if name.startswith("hocket")]
    report = {
        "python": platform.python_version(),
        "installed": {name: distribution.version for name, distribution in installed.items()},
        "incomplete": [name for distribution in ours for name in check(distribution, Path(wheels))],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
