"""The exit codes of the ``hocket`` command."""

from __future__ import annotations

from enum import IntEnum

from hocket.basics.control_c import EXIT_CODE


class ExitCode(IntEnum):
    """What a command returns to the shell. Commands of other packages may return more."""

    #: The command did what it was asked to do.
    DONE = 0
    #: Something was found to be wrong, such as a damaged checkpoint, or a run ended with an error.
    FAILED = 1
    #: The command was not understood, or cannot be done as it was written.
    MISTAKE = 2
    #: SIGTERM or Control-C ended a run with ``checkpoints=``, which continues from there: "try again later" of sysexits.h; also
    #: the code of ``python train.py``. Without ``checkpoints=`` nothing is saved, and the code is another.
    SAVED = EXIT_CODE
    #: Control-C ended a sweep, which the same command continues.
    INTERRUPTED = 130
