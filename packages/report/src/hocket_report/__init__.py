"""One HTML page about runs. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_report.callback import Report
    from hocket_report.page import write

#: Public name -> the module that defines it.
_PUBLIC = {"Report": "callback", "write": "page"}

__all__ = ["Report", "write"]

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
