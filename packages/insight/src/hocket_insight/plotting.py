"""Draw a history with matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.basics.display import notebook
from hocket.basics.history import POSITION, History
from hocket.errors import MissingPackage, WrongType

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3
_AXES = {
    "batch": "batches",
    "epoch": "epochs",
    "sample": "samples",
    "token": "tokens",
    "seconds": "seconds of training",
}


def figure(history: History, names: Sequence[str], by: str) -> Figure:
    """Return a figure of columns; see `hocket.basics.history.History.plot`."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingPackage("Plots are drawn by matplotlib. Install it: pip install matplotlib") from error
    history[by]  # raises KeyError with the columns
    charts = _charts(history, names)
    columns = min(len(charts), _COLUMNS)
    rows = math.ceil(len(charts) / columns)
    made, grid = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.2 * rows), layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for (title, members), axis in zip(charts.items(), axes, strict=False):
        for name in members:
            positions, values = history.series(name, by)
            axis.plot(positions, values, label=name, marker="o" if len(values) == 1 else None)
        axis.set_xlabel(_AXES.get(by, by))
        axis.set_title(title)
        axis.legend()
    for axis in axes[len(charts) :]:
        axis.remove()
    if notebook() is not None:
        pyplot.close(made)  # the notebook shows what a cell returns, and would show an open figure again
    return made


def _charts(history: History, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of each chart by its title. Without names, each prefix has one."""
    there = [name for name in history if name not in POSITION]
    if not names:
        charts: dict[str, list[str]] = {}
        for name in there:
            charts.setdefault(name.rpartition("/")[0] or name, []).append(name)
        if not charts:
            raise KeyError("Nothing was logged yet, so there is nothing to plot. Train first: trainer.fit().")
        return charts
    charts = {}
    for asked in names:
        if not isinstance(asked, str):
            raise WrongType(
                f"plot({asked!r}) is not a name. Write each on its own: result.plot('train/loss', 'test/loss')."
            )
        found = (
            [asked] if asked in there else [n for n in there if n.startswith(f"{asked}/") or n.endswith(f"/{asked}")]
        )
        if not found:
            history[asked]  # raises KeyError with the nearest column
            raise KeyError(f"{asked!r} is a position. Write by={asked!r} to plot other columns over it.")
        prefix = asked.rpartition("/")[0]
        charts.setdefault(prefix if asked in there and prefix else asked, []).extend(found)
    return charts
