"""Exceptions of the user's code, described in one line with theirs."""

from __future__ import annotations

import textwrap
import traceback
import types
from pathlib import Path

from hocket.help import installing
from hocket.help.ours import is_ours


def raised(doing: str, error: BaseException, advice: str = "") -> str:
    """Describe an exception of somebody's code, with the line of the innermost frame in a file of theirs, and what to do."""
    if isinstance(error, SyntaxError):
        place = f"{_relative(error.filename)}:{error.lineno}"
        line = " ".join((error.text or "").split())
        return f"{doing} raised {type(error).__name__}: {error.msg} ({place}): `{line}`. Correct that line."
    frames = traceback.StackSummary.extract(filter(_is_users, traceback.walk_tb(error.__traceback__)))
    sentence = f"{doing} raised {type(error).__name__}: {_message(error)}"
    if not frames:
        return f"{sentence}. {advice or 'Change the value.'}"
    sentence = f"{sentence} ({_relative(frames[-1].filename)}:{frames[-1].lineno}): `{frames[-1].line}`."
    if advice:
        return f"{sentence} {advice}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{sentence} Correct that line, or type: {installing.library(error.name.partition('.')[0])}"
    return f"{sentence} Change the value here or that line; --traceback shows all calls."


def _message(error: BaseException) -> str:
    """Return the message of an exception on one line, without the C++ calls that torch adds to it."""
    text = str(error).partition("Exception raised from ")[0].rstrip()
    quote = '"' if text.count('"') % 2 else ""
    return textwrap.shorten(text + quote, 600, placeholder=" …").rstrip(".")


def _is_users(step: tuple[types.FrameType, int]) -> bool:
    file, module = step[0].f_code.co_filename, step[0].f_globals.get("__name__")
    library = file.startswith(("<", str(Path(traceback.__file__).parent))) or "site-packages" in file
    return not library and not is_ours(module)


def _relative(file: str | None) -> str:
    try:
        return Path(file or "?").resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(file)
