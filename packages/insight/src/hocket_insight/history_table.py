"""The table of a history in a notebook."""

from __future__ import annotations

import math
from html import escape

from hocket.basics.history import History


def html(history: History) -> str:
    """Return the first and last rows as a table, with everything in it escaped."""
    shown = [*range(history.rows)] if history.rows <= 10 else [*range(5), *range(history.rows - 5, history.rows)]
    lines = [_row("th", ["", *history])]
    for before, row in zip([-1, *shown], shown, strict=False):
        if row != before + 1:
            lines.append(_row("td", ["…"] * (len(history) + 1)))
        lines.append(_row("td", [str(row), *(_number(column[row]) for column in history.values())]))
    return f"<table>{''.join(lines)}</table>{history.rows} rows"


def _number(value: float) -> str:
    return "" if math.isnan(value) else str(value) if isinstance(value, int) else f"{value:.4g}"


def _row(cell: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in texts)}</tr>"
