"""Fail unless every wheel holds the license, the type marker and the module of each of its entry points.

usage: check_wheels.py ROOT WHEEL...
"""

import configparser
import sys
from pathlib import Path
from zipfile import ZipFile


def check(wheel: Path, license_text: bytes) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        if archive.read(f"{info}/licenses/LICENSE") != license_text:
            sys.exit(f"{wheel.name}: its LICENSE differs from the repository's")
        tops = {name.split("/")[0] for name in names} - {info}
        if len(tops) != 1 or f"{(top := tops.pop())}/py.typed" not in names:
            sys.exit(f"{wheel.name}: expected one typed package, found {sorted(tops)}")
        declared = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        declared.optionxform = str
        if f"{info}/entry_points.txt" in archive.namelist():
            declared.read_string(archive.read(f"{info}/entry_points.txt").decode())
        for group in declared.sections():
            for name, target in declared.items(group):
                path = target.split(":")[0].replace(".", "/")
                if path.startswith(f"{top}/") and not {f"{path}.py", f"{path}/__init__.py"} & names:
                    sys.exit(f"{wheel.name}: {group} {name} = {target}, but there is no such module in the wheel")
    print(f"{wheel.name}: {len(names)} files")


def main(root: str, *wheels: str) -> None:
    for wheel in wheels:
        check(Path(wheel), (Path(root) / "LICENSE").read_bytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
