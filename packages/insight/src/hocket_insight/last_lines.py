"""The last lines of a fit: where it ended, what it has written, and how to continue."""

from __future__ import annotations

import multiprocessing
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.basics.display import listed
from hocket.errors import CheckpointError

if TYPE_CHECKING:
    from hocket.checkpoints import Checkpoints
    from hocket.state.state import State


def last_lines(
    state: State, checkpoints: Checkpoints | None, command: Sequence[str] | None, interrupted: bool
) -> list[str]:
    """Return at most three lines. Reads the store of the checkpoints, and never raises because of it.

    Args:
        checkpoints: those of this run, if it writes any.
        command: the words of the command line that resumes the run, if it was started by one.
        interrupted: whether a signal ended the fit before its duration.
    """
    if not state.folder.lasting:
        return ["this was a test, which writes nothing"]
    try:
        written = "" if checkpoints is None else checkpoints.listing.summary()
    except (CheckpointError, OSError) as error:
        written = f"the checkpoints cannot be listed: {error}"
    lines = [
        f"{'interrupted' if interrupted else 'done'} at ep {state.timestamp.epoch} ba {state.timestamp.batch}: "
        + (written or "no checkpoint was written")
    ]
    if state.timestamp.batch and (files := state.folder.files()):  # before the first step, the command removes them
        lines.append(f"{listed(files)} in {state.folder.path}")
    resumable = written and checkpoints is not None and checkpoints.listing.resumable
    return [*lines, _how_to_continue(bool(resumable), command, interrupted)]


def _how_to_continue(resumable: bool, command: Sequence[str] | None, interrupted: bool) -> str:
    aim, here = ("continue", "trainer.fit()") if interrupted else ("train longer", "trainer.fit('1ep')")
    longer = "" if interrupted else "duration=…"
    # At a prompt or in a notebook the Trainer still exists, unless this is a fork of it.
    interactive = hasattr(sys, "ps1") and multiprocessing.parent_process() is None
    if not resumable and command is not None:
        return f"to resume runs in another process, write `checkpoints: runs/…` and `resume: auto` in {command[2]}"
    if not resumable:
        later = "to resume runs in another process, pass checkpoints=hocket.Checkpoints('runs/…')"
        return f"to {aim}: {here}; {later}" if interactive else later
    if command is not None:
        words = command if interrupted else [*(word for word in command if not word.startswith("duration=")), longer]
        return f"to {aim}: {' '.join(map(shlex.quote, words))}"
    resume = ", ".join(filter(None, ["Trainer(…", longer, "resume='auto')"]))
    return f"to {aim}: {here}, or in another process {resume}" if interactive else f"to {aim}: {resume}"
