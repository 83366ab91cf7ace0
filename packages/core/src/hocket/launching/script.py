"""How this process was started, and how to start its script once more."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def command_again(devices: int) -> list[str]:
    """The command line that runs this script in another process, as `hocket.launching.worker` does it.

    Raises RuntimeError where there is no script to run again, and says what to do instead.
    """
    options, kind, target, arguments = split(sys.orig_argv)
    main = sys.modules["__main__"]
    place = ""
    if multiprocessing.parent_process() is not None:
        place = "in a process that another one of the script has started"
    elif hasattr(builtins, "get_ipython") or hasattr(sys, "ps1") or sys.flags.interactive:
        place = "in a notebook or an interactive session"
    elif not target or kind == "-c":
        place = "where there is no file, but code from the standard input or from -c"
    elif getattr(getattr(main, "__spec__", None), "name", "") == "pytest.__main__" or Path(target).name in _PYTEST:
        place = "under pytest, all of which would run again"
    elif getattr(sys, "frozen", False) or os.name != "posix":
        place = "in a frozen application" if os.name == "posix" else "on Windows"
    if place:
        raise RuntimeError(
            f"Trainer(devices={devices}) runs the script again for every other rank, which cannot be done {place}. Put all "
            f"that trains into a function and call hocket.launch(function, {devices}), or move it into a script of its own "
            f"and type: hocket launch -n {devices} script.py"
        )
    file = getattr(main, "__file__", None)
    if not kind:  # the interpreter made it absolute when it started; the script may have changed the folder since
        target = os.path.abspath(file if file and os.path.basename(file) == os.path.basename(target) else target)
    return [
        sys.executable,
        *options,
        "-P",
        "-m",
        "hocket.launching.worker",
        *([kind] if kind else []),
        target,
        *arguments,
    ]


_PYTEST = ("pytest", "py.test")


def split(argv: Sequence[str]) -> tuple[list[str], str, str, list[str]]:
    """A command line of python: the interpreter's options; ``"-m"``, ``"-c"`` or ``""``; what to run; its arguments.

    What to run is empty where it is the standard input.
    """
    words = list(argv[1:])
    options: list[str] = []
    while words and words[0] != "-" and words[0].startswith("-"):
        word = words.pop(0)
        if word.startswith("--"):
            options.append(word)
            if word == "--check-hash-based-pycs":
                options.append(words.pop(0))
            continue
        end = next((i for i, letter in enumerate(word) if letter in "cmWX"), len(word))
        if end == len(word):
            options.append(word)
            continue
        value = word[end + 1 :] or (words.pop(0) if words else "")
        if word[end] in "WX":
            options.append(word if word[end + 1 :] else word + value)
            continue
        if end > 1:
            options.append(word[:end])
        return options, f"-{word[end]}", value, words
    if not words or words[0] == "-":
        return options, "", "", words[1:]
    return options, "", words[0], words[1:]
