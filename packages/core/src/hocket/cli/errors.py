"""Which exceptions are errors of the user, with a message that says what to type; any other needs its traceback."""

from __future__ import annotations

import linecache

from hocket.plugins import PluginError


def explains(error: BaseException) -> bool:
    """Whether a `raise` of hocket or its plug-ins raised this exception, so that its message suffices."""
    if isinstance(error, PluginError):
        return True
    if isinstance(error, LookupError) or not isinstance(
        error, ValueError | TypeError | OSError | RuntimeError | ArithmeticError
    ):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code, scope = trace.tb_frame.f_code, trace.tb_frame.f_globals
    package = str(scope.get("__name__")).partition(".")[0].partition("_")[0]
    line = linecache.getline(code.co_filename, trace.tb_lineno, scope)
    return package == "hocket" and line.strip().startswith("raise ")
