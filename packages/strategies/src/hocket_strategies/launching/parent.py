"""End a rank when the process that started it is gone, even if that was killed and could not end its ranks."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time

#: ``HOCKET_LAUNCHER`` tells a rank which process started it, so that the rank ends with that process. hocket sets it.
_LAUNCHER = "HOCKET_LAUNCHER"
#: Seconds between two looks at the launcher.
_INTERVAL = 0.5
#: Of ``prctl`` in Linux: the signal that a process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1


def variable() -> dict[str, str]:
    """Return the environment variable that names this process to the ranks that this thread starts."""
    thread = "" if threading.current_thread() is threading.main_thread() else " thread"
    return {_LAUNCHER: f"{os.getpid()}{thread}"}


def end_with_launcher() -> None:
    """Have this process, which `variable` was given to, be killed when its launcher is gone."""
    launcher, _, thread = os.environ.pop(_LAUNCHER, "").partition(" ")
    if launcher:
        end_with(int(launcher), lasts=not thread)


@functools.cache
def end_with(launcher: int, lasts: bool = True) -> None:
    """Have this process, a child of ``launcher``, be killed when that is gone: in Linux at once, elsewhere within a second.

    ``lasts``: whether the thread that started this process lives as long as the launcher. Linux takes the end of that thread
    for the end of the launcher; then, too, a thread of this process looks for the launcher instead.
    """
    asked = False
    if sys.platform == "linux" and lasts:
        import ctypes

        asked = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    # It is not the parent if it has ended already, or if a wrapper of the interpreter is between the two.
    is_child = os.getppid() == launcher
    if asked and is_child:
        return

    def watch() -> None:
        while os.getppid() == launcher if is_child else _exists(launcher):
            time.sleep(_INTERVAL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="hocket-launcher", daemon=True).start()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
