"""Fail unless exactly the named distributions of hocket are installed, in one version, from one folder of this disk.

usage: check_origin.py VERSION ORIGIN_URI NAME...
"""

import json
import sys
from importlib.metadata import distributions


def main(version: str, origin: str, *expected: str) -> None:
    found = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name.lower().startswith("hocket"):
            record = json.loads(distribution.read_text("direct_url.json") or "{}")
            found[name] = (distribution.version, record.get("url", "a registry"))
    if set(found) != set(expected):
        sys.exit(f"installed are {sorted(found)}; expected {sorted(expected)}")
    for name, (installed, url) in found.items():
        if installed != version or not url.startswith(origin.rstrip("/") + "/"):
            sys.exit(f"{name} {installed} came from {url}; expected {version} from {origin}")
    print(f"{len(found)} distributions of hocket {version}, all from {origin}")


if __name__ == "__main__":
    main(*sys.argv[1:])
