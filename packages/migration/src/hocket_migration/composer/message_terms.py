"""Composer's names in the messages of hocket's errors and warnings."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import hocket

#: Phrases of hocket's messages, as patterns, and what a user of Composer's Trainer writes.
_PHRASES = {
    r"Pass duration=('\w+') or the like to the Trainer or to fit": r"Pass max_duration=\1 to the Trainer, or fit(duration=\1)",
    r"Pass data to evaluate\(\), or eval_data= to the Trainer": "Pass eval_dataloader= to eval() or to the Trainer",
    r", or return it from \w+\(\) of the data module": "",
    r"\bcheckpoints=hocket\.Checkpoints\((?:'[^']*', )?(overwrite=True)\)": r"save_\1",
    r"\bresume='auto'": "autoresume=True",
    r"\bcheckpoints=hocket\.Checkpoints\(('[^']*')\)": r"save_folder=\1",
    r"\bduration=…": "max_duration=…",
    r"\.fit\(('\w+')\)": r".fit(duration=\1)",
    r", or give a function: optimizer=lambda parameters: .*": ".",
}
#: hocket's arguments whose values mean the same in Composer's.
_ARGUMENTS = {
    "compile": "compile_config",
    "deterministic": "deterministic_mode",
    "duration": "max_duration",
    "eval_data": "eval_dataloader",
    "limit_train": "train_subset_num_batches",
    "microbatch": "device_train_microbatch_size",
    "train_data": "train_dataloader",
}
_VALUE = r"('[^']*'|-?\d+(?:\.\d+)?|True|False|None)"


@contextmanager
def translated() -> Iterator[None]:
    """Translate hocket's errors and warnings inside the context, or in the decorated function; others stay as they are."""
    show = warnings.showwarning

    def show_translated(message: Any, *details: Any, **more: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "warnings":
            frame = frame.f_back
        if frame is not None and _of_hocket(frame):
            message = type(message)(in_composers(str(message)))
        show(message, *details, **more)

    warnings.showwarning = show_translated
    try:
        yield
    except Exception as error:
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is not None and _of_hocket(last.tb_frame) and error.args and isinstance(error.args[0], str):
            error.args = (in_composers(error.args[0]), *error.args[1:])
        raise
    finally:
        if warnings.showwarning is show_translated:
            warnings.showwarning = show


def _of_hocket(frame: Any) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package.startswith("hocket") and package != "hocket_migration"


def in_composers(message: str) -> str:
    """Return a message with Composer's arguments; one that Composer does not have, in ``hocket={…}``.

    Example:
        >>> from hocket_migration.composer.message_terms import in_composers
        >>> in_composers("microbatch=0 is not a number of samples. Write nonfinite='skip'.")
        "device_train_microbatch_size=0 is not a number of samples. Write hocket={'nonfinite': 'skip'}."
    """
    for pattern, instead in _PHRASES.items():
        message = re.sub(pattern, instead, message)
    for name, composers in _ARGUMENTS.items():
        named = r"[=\[]| is " if "_" in name else "="  # the others are words of sentences too
        message = re.sub(rf"(?<![\w.])(?<!fit\(){name}(?={named})", composers, message)
    return re.sub(rf"(?<![\w.])({'|'.join(_own())})={_VALUE}", r"hocket={'\1': \2}", message)


@cache
def _own() -> tuple[str, ...]:
    """Return the arguments of hocket's Trainer that Composer's does not have."""
    from hocket_migration.composer.trainer import Trainer

    there = inspect.signature(Trainer).parameters
    return tuple(name for name in inspect.signature(hocket.Trainer).parameters if name not in {*there, *_ARGUMENTS})
