"""The ``hocket`` command, also as ``python -m hocket``, which another part of hocket defines."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command and return its exit code; 2 and what to install, if the command line is not installed."""
    from hocket.help import elsewhere

    try:
        command_line = elsewhere.module("hocket_cli")
    except elsewhere.NotInstalled as error:
        print(f"hocket: {error}", file=sys.stderr)
        return 2
    code: int = command_line.main()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
