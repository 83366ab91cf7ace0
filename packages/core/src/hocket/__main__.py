"""The ``hocket`` command, also as ``python -m hocket``, which another part of hocket defines."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command and return its exit code; 2 and what to install, if the command line is not installed."""
    from hocket.help import optional_packages

    try:
        command_line = optional_packages.module("hocket_cli")
    except optional_packages.NotInstalled as error:
        print(f"hocket: {error}", file=sys.stderr)
        return 2
    code: int = command_line.main()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
