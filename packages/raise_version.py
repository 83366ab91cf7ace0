"""Give every package a version, and what they share: ``nox -s version -- 0.2.0``.

Writes VERSION.py, the requirements between the packages, and the changelog from the fragments in ``changes/``. The facts
that all packages share stand in core's pyproject.toml, from ``readme`` to the end of ``classifiers``; the others get a copy.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

PACKAGES = Path(__file__).parent
SHARED = re.compile(r"^readme = .*?^\]$", re.MULTILINE | re.DOTALL)
_OURS = re.compile(r'(?<=")(hocket[a-z-]*(?:\[[\w,]+\])?)(>=|~=)[\d.,<a-z]+(?=")')


def raised(pyproject: str, version: Version, shared: str) -> str:
    """Return a pyproject.toml with these shared facts, and requirements on packages of this version."""
    ranges = {">=": f">={version},<{version.major}.{version.minor + 1}", "~=": f"~={version}"}
    text = SHARED.sub(lambda _: shared, pyproject)
    return _OURS.sub(lambda match: match[1] + ranges[match[2]], text)


def write(version: Version, packages: Path = PACKAGES) -> None:
    """Write VERSION.py and every pyproject.toml below `packages`."""
    file = packages / "VERSION.py"
    file.write_text(re.sub('__version__ = ".*"', f'__version__ = "{version}"', file.read_text()))
    match = SHARED.search((packages / "core/pyproject.toml").read_text())
    assert match, "core's pyproject.toml has lost its lines from `readme` to `classifiers`"
    for project in packages.glob("*/pyproject.toml"):
        project.write_text(raised(project.read_text(), version, match[0]))


def main(text: str) -> None:
    version = Version(text)
    if len(version.release) != 3:
        sys.exit(f"{text} is no version of three numbers; type for instance 0.2.0 or 0.2.0rc1")
    write(version)
    if version.is_prerelease:
        print(f"The changelog keeps its fragments in changes/ until {version.base_version}.")
    else:
        subprocess.run(["towncrier", "build", "--yes", "--version", str(version)], cwd=PACKAGES.parent, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
