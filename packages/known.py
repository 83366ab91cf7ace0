"""Write the table of what the other packages of this repository provide, for core's hints: ``python packages/known.py``."""

from __future__ import annotations

import tomllib
from pathlib import Path

PACKAGES = Path(__file__).parent
FILE = PACKAGES / "core/src/hocket/plugins/known.toml"
_HEAD = """\
# Plug-ins of the other packages of this repository, by kind: name = the extra of hocket that brings it.
# Made of the packages' pyproject.toml by `python packages/known.py`.
"""


def table() -> str:
    """Return the text of the file, from the entry points and extras of all packages."""
    projects = [tomllib.loads(file.read_text()) for file in sorted(PACKAGES.glob("*/pyproject.toml"))]
    core = next(each for each in projects if each["project"]["name"] == "hocket")
    # By the one requirement of an extra: "hocket-strategies[ray]" -> "ray".
    extras = {
        requirement.partition("~=")[0]: extra
        for extra, requirements in core["project"]["optional-dependencies"].items()
        for requirement in requirements[:1]
    }
    known: dict[str, dict[str, str]] = {}
    for each in projects:
        if each is core:
            continue
        name = each["project"]["name"]
        needs = {
            plugin: f"{name}[{extra}]"
            for extra, plugins in each.get("tool", {}).get("hocket", {}).get("extras", {}).items()
            for plugin in plugins
        }
        for group, points in each["project"].get("entry-points", {}).items():
            kind = group.removeprefix("hocket.v1.")
            known.setdefault(kind, {}).update((plugin, extras[needs.get(plugin, name)]) for plugin in points)
    lines = [_HEAD]
    for kind, plugins in sorted(known.items()):
        lines.append(f"[{kind}]\n" + "".join(f'{plugin} = "{extra}"\n' for plugin, extra in sorted(plugins.items())))
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text(table())
