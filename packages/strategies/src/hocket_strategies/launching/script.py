"""Detect how this process was started, and build the command line that runs its script again."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hocket.errors import WrongState


def command_again(devices: int) -> list[str]:
    """Return the command line that runs this script in another process, through `hocket_strategies.launching.worker`.

    Raises RuntimeError if there is no script to run again; the message says what to do instead.
    """
    options, kind, target, arguments = split(sys.orig_argv)
    main = sys.modules["__main__"]
    place = ""
    if multiprocessing.parent_process() is not None:
        place = "in a child process of the script"
    elif hasattr(builtins, "get_ipython") or hasattr(sys, "ps1") or sys.flags.interactive:
        place = "in a notebook or an interactive session"
    elif not target or kind == "-c":
        place = "for code from the standard input or from -c"
    elif getattr(getattr(main, "__spec__", None), "name", "") == "pytest.__main__" or Path(target).name in _PYTEST:
        place = "under pytest, because the full test session would run again"
    elif getattr(sys, "frozen", False) or os.name != "posix":
        place = "in a frozen application" if os.name == "posix" else "on Windows"
    if place:
        raise WrongState(
            f"Trainer(devices={devices}) runs the script again for every other rank, which is not possible {place}. Put the "
            f"training code into a function and call hocket.launch(function, {devices}), or move it into a separate script "
            f"and type: hocket launch -n {devices} script.py"
        )
    file = getattr(main, "__file__", None)
    if not kind:  # Python made __file__ absolute at start-up; the script may have changed the working folder since
        target = os.path.abspath(file if file and os.path.basename(file) == os.path.basename(target) else target)
    return [
        sys.executable,
        *options,
        "-P",
        "-m",
        "hocket_strategies.launching.worker",
        *([kind] if kind else []),
        target,
        *arguments,
    ]


_PYTEST = ("pytest", "py.test")


def split(argv: Sequence[str]) -> tuple[list[str], str, str, list[str]]:
    """Split a python command line into interpreter options; ``"-m"``, ``"-c"`` or ``""``; target; arguments of the target.

    The target is empty if python reads the standard input.
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
