"""Draw losses by learning rate with matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.basics.display import notebook
from hocket.errors import MissingPackage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hocket_tools.tuning.lr_finder import LearningRate


def check_library() -> None:
    """Raise MissingPackage without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackage("Plots are drawn by matplotlib. Install it: pip install matplotlib")


def figure(searches: Sequence[LearningRate]) -> Figure:
    """Return a figure with a chart for each optimizer: the range test, the short runs and the suggestion."""
    check_library()
    from matplotlib import pyplot

    drawn, grid = pyplot.subplots(
        1, len(searches), figsize=(5 * len(searches), 3.2), layout="constrained", squeeze=False
    )
    for search, axis in zip(searches, grid.flat, strict=True):
        rates, losses = zip(*search.table, strict=True) if search.table else ((), ())
        axis.plot(rates, losses, label="range test")
        finite = [(rate, loss) for rate, loss in search.runs if math.isfinite(loss)]
        if finite:
            axis.plot(*zip(*finite, strict=True), "o", label="end of a short run")
        if losses:  # the end of a divergence would hide everything else
            lowest, first = min([*losses, *(loss for _, loss in finite)]), max(losses[:8])
            axis.set_ylim(lowest - 0.1 * (first - lowest), first + 0.3 * (first - lowest))
        if search.suggestion is not None:
            axis.axvline(search.suggestion, linestyle=":", color="black", label=f"suggestion {search.suggestion:.2g}")
        axis.set_xscale("log")
        axis.set_xlabel("learning rate")
        axis.set_ylabel("loss")
        axis.set_title("" if len(searches) == 1 else f"optimizer {search.optimizer}")
        axis.legend()
    if notebook() is not None:
        pyplot.close(drawn)  # the notebook shows what a cell returns, and would show an open figure again
    return drawn
