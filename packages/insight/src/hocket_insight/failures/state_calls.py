"""Exceptions of plug-ins that use the State in another way."""

from __future__ import annotations

import re

from hocket.help import attributes, names


def explain(error: BaseException) -> None:
    """Add a note to an exception of a plug-in that uses the State in another way, such as ``state.log("a", 1)``.

    ``__getattr__`` would slow down each access to the State in a step.
    """
    obj = getattr(error, "obj", None)
    if isinstance(error, TypeError) and (called := re.match(r"State\.(log|request)\(\) ", str(error))):
        text = {
            "log": "state.log takes values by name. Write state.log({'name': value}).",
            "request": "Write state.request(hocket.Decision.STOP, reason='…').",
        }[called[1]]
        keyword = re.search(r"State\.log\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if keyword and (theirs := names.listed(keyword[1], "log-arguments")):
            text = f"Instead of {keyword[1]}= write {theirs}."
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)
    if isinstance(error, AttributeError) and error.name and type(obj).__qualname__ == "State":
        text = attributes.missing("State", error.name, obj)
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)
