"""Show an object as a few labelled lines, or as the same table in a notebook."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.basics.timestamp import Timestamp

_LEFT = "text-align:left;vertical-align:top"


def text(title: str, rows: Mapping[str, str]) -> str:
    """Return the title, and an indented line for each row; further lines of a row are aligned with its first."""
    width = max(map(len, rows), default=0)
    indent = "\n" + " " * (width + 4)
    return "\n".join([title, *(f"  {name:<{width}}  {value.replace(chr(10), indent)}" for name, value in rows.items())])


def html(title: str, rows: Mapping[str, str]) -> str:
    """Return the title and a table, with everything in them escaped."""
    from html import escape  # only needed in notebooks

    cells = "".join(
        f'<tr><th style="{_LEFT}">{escape(name)}</th><td style="{_LEFT};white-space:pre-wrap">{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<b>{escape(title)}</b><table>{cells}</table>"


def position(now: Timestamp) -> str:
    """Return a position in words, such as ``2 epochs, 57 batches, 1,797 samples``."""
    counts = {"epoch": now.epoch, "batch": now.batch, "sample": now.sample}
    plural = {"epoch": "epochs", "batch": "batches", "sample": "samples"}
    return ", ".join(f"{count:,} {name if count == 1 else plural[name]}" for name, count in counts.items())


def notebook() -> Any:
    """Return the IPython shell of the notebook that this process runs, or None. A fork of it cannot show anything there."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    session = getattr(getattr(shell, "kernel", None), "session", None)
    return shell if session is not None and getattr(session, "pid", os.getpid()) == os.getpid() else None


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names separated by commas; of more than ``most``, the first and the last."""
    shown = list(names)
    if len(shown) > most:
        shown = [*shown[: most // 2], f"… ({len(shown) - most} more)", *shown[-(most - most // 2) :]]
    return ", ".join(shown)
