"""The main module of a worker: ``python -P -m hocket_strategies.launching.worker [-m] target arguments…``.

The target runs as ``__main__``. In addition, the worker writes an exception to the launcher's error file, ends within `GRACE`
seconds after an exception even if threads are still running, and ends when the launcher is gone.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path

from hocket_strategies.launching.errors import write_error
from hocket_strategies.launching.parent import end_with_launcher

#: Seconds for clean-up after an exception; the other ranks wait until this process ends.
GRACE = 10.0


def main() -> None:
    """Run the target that the arguments name."""
    end_with_launcher()
    module = sys.argv[1] == "-m"
    target, *arguments = sys.argv[2:] if module else sys.argv[1:]
    try:
        _run(target, arguments, module)
    except SystemExit as end:
        if end.code not in (None, 0):
            _record(end, end.code if isinstance(end.code, int) else 1)
        raise
    except BaseException as error:
        _record(error, 1)
        raise


def _run(target: str, arguments: list[str], module: bool) -> None:
    # Insert the path entry that Python would put first. -P omitted it, so that no module there shadows a part of hocket.
    if module:
        sys.argv = [target, *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        target = os.path.abspath(target)  # as Python does for __file__
        sys.argv = [target, *arguments]
        if Path(target).is_file():
            sys.path.insert(0, str(Path(target).parent.resolve()))
        runpy.run_path(target, run_name="__main__")


def _record(error: BaseException, code: int) -> None:
    write_error(error, code)
    threading.Thread(target=_end_anyway, args=(code,), daemon=True).start()


def _end_anyway(code: int) -> None:
    time.sleep(GRACE)
    os._exit(code)


if __name__ == "__main__":
    main()
