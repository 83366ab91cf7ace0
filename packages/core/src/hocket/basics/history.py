"""The table of everything that a run has logged."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hocket.basics.timestamp import Timestamp
from hocket.help import attributes, names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The columns that every row has: what was completed, over all ranks, and seconds of training.
POSITION = ("epoch", "batch", "sample", "token", "seconds")


class History(attributes.Columns, dict[str, list[float]]):
    """Everything that a Trainer has logged in its fits and evaluations, as columns of equal length by name.

    There is one row for each batch after which values were logged. ``epoch``, ``batch``, ``sample``, ``token`` and ``seconds``
    (of training) are its position. A value that was not logged there is NaN; of several with one name the last counts. A
    metric named ``epoch`` becomes ``metric/epoch``. Values are those of this rank. Checkpoints hold the table of rank 0: a
    resumed run continues it.

    Until the end of the run, a value takes 16 bytes and a row 40; fewer are logged with a larger ``log_every``.

    Example:
        >>> import hocket, torch
        >>> data = [(torch.ones(8, 4), torch.ones(8, 1))] * 20
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", train_data=data, eval_data=data,
        ...     duration="2ep", log_every="5ba", eval_every="1ep", device="cpu",
        ... )
        >>> history = trainer.fit().history  # pandas.DataFrame(history) makes a data frame
        >>> history["batch"], len(history["train/loss"])
        ([5, 10, 15, 20, 25, 30, 35, 40], 8)
        >>> batches, losses = history.series("eval/loss")  # matplotlib.pyplot.plot(batches, losses)
        >>> batches
        [20, 40]
    """

    def series(self, name: str, by: str = "batch") -> tuple[list[float], list[float]]:
        """Return two lists without gaps: the positions at which ``name`` was logged, by any other column, and the values.

        A plot of the column itself has gaps where other values were logged more often. Values that were logged as NaN are
        omitted. Raises KeyError naming the columns.
        """
        pairs = [(at, value) for at, value in zip(self[by], self[name], strict=True) if not math.isnan(value)]
        return [at for at, _ in pairs], [value for _, value in pairs]

    def plot(self, *names: str, by: str = "batch") -> Figure:
        """Draw columns with matplotlib, which is imported only here, and return the figure: one chart for each prefix.

        Args:
            names: columns such as ``"train/loss"``, or the part after or before the slash, such as ``"loss"`` or ``"lr"``; all
                that are no position by default. ``train/loss`` and ``test/loss`` share a chart if they are asked for as
                ``"loss"``.
            by: the column of the horizontal axis.

        Raises:
            KeyError: there is no such column, or nothing was logged; the message names the columns.
            ImportError: matplotlib is missing; the message says how to install it.

        Example:
            >>> import hocket, torch
            >>> trainer = hocket.Trainer(
            ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
            ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20, duration="1ep", callbacks=["lr-monitor"],
            ... )
            >>> figure = trainer.fit().history.plot("loss", "lr")  # doctest: +SKIP
        """
        from hocket.help import optional_packages

        figure: Figure = optional_packages.module("hocket_insight.plotting").figure(self, names, by)
        return figure

    def __missing__(self, name: object) -> list[float]:
        near = names.closest(name, self, 0.5)
        if isinstance(name, int | slice):
            near = next((column for column in self if column not in POSITION), "train/loss")
            raise KeyError(
                f"A History is a table of columns by name: {', '.join(self)}. Write history[{near!r}][{name}]."
            )
        raise KeyError(
            f"There is no {name!r} in the history. It has: {', '.join(self) or 'nothing'}."
            + (f" Write history[{near!r}]." if near else "")
        )

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self["batch"]) if self else 0

    def __repr__(self) -> str:
        return f"History of {self.rows} rows: {', '.join(self) or 'no columns'}"

    def _repr_html_(self) -> str | None:
        from hocket.help import optional_packages

        table: str | None = optional_packages.ask("history_table.html", self)
        return table


class Recorder:
    """Collect the values of a run for a `History`. The loop adds those that it passes to loggers."""

    def __init__(self) -> None:
        self._position: dict[str, array[Any]] = {name: array("d" if name == "seconds" else "q") for name in POSITION}
        #: By name: the rows in which a value was logged, and the values.
        self._logged: dict[str, tuple[array[int], array[float]]] = {}
        #: Rows that are not yet in the columns, which is quicker for many at once.
        self._rows: list[tuple[tuple[int, int, int, int, float], Mapping[str, float]]] = []

    def names(self) -> list[str]:
        """Return the names of the values that were added."""
        self._add_rows()
        return list(self._logged)

    def add(self, now: Timestamp, values: Mapping[str, float]) -> None:
        """Add values at this position."""
        self._rows.append(((now.epoch, now.batch, now.sample, now.token, now.seconds), values))
        if len(self._rows) >= 100:
            self._add_rows()

    def _add_rows(self) -> None:
        rows, self._rows = self._rows, []
        for position, values in rows:
            self._add(position, values)

    def _add(self, position: tuple[int, int, int, int, float], values: Mapping[str, float]) -> None:
        columns, batches, batch = self._position.values(), self._position["batch"], position[1]
        while batches and batches[-1] > batch:  # the run went back to an earlier state
            self._remove_last()
        if batches and batches[-1] == batch:
            for column, value in zip(columns, position, strict=True):
                column[-1] = value
        else:
            for column, value in zip(columns, position, strict=True):
                column.append(value)
        row = len(batches) - 1
        for name, value in values.items():
            logged = self._logged.get(name)
            if logged is None:
                logged = self._logged[name] = (array("q"), array("d"))
            rows, numbers = logged
            if rows and rows[-1] == row:
                numbers[-1] = value
            else:
                rows.append(row)
                numbers.append(value)

    def _remove_last(self) -> None:
        row = len(self._position["batch"]) - 1
        for column in self._position.values():
            column.pop()
        for rows, values in self._logged.values():
            if rows and rows[-1] == row:
                rows.pop()
                values.pop()

    def latest(self, prefix: str) -> Iterator[tuple[str, float]]:
        """Yield the latest value of each name with this prefix."""
        self._add_rows()
        for name, (_, values) in self._logged.items():
            if values and name.startswith(prefix):
                yield name, values[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return all rows, as vectors."""
        self._add_rows()
        rows = itertools.chain.from_iterable(rows for rows, _ in self._logged.values())
        values = itertools.chain.from_iterable(values for _, values in self._logged.values())
        return {
            "position": {name: _vector(column) for name, column in self._position.items()},
            "logged": [[name, len(rows)] for name, (rows, _) in self._logged.items()],
            "rows": _vector(array("q", rows)),
            "values": _vector(array("d", values)),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self._rows = []
        for name, column in tree["position"].items():
            self._position[name] = array(self._position[name].typecode, column.tolist())
        rows, values, at = tree["rows"].tolist(), tree["values"].tolist(), 0
        self._logged = {}
        for name, length in tree["logged"]:
            self._logged[name] = array("q", rows[at : at + length]), array("d", values[at : at + length])
            at += length

    def table(self) -> History:
        """Return a copy as a table."""
        self._add_rows()
        history = History({name: list(column) for name, column in self._position.items()})
        for name, (rows, values) in self._logged.items():
            column = history[f"metric/{name}" if name in POSITION else name] = [math.nan] * history.rows
            for row, value in zip(rows, values, strict=True):
                column[row] = value
        return history


def _vector(column: array[Any]) -> Any:
    import torch

    dtype = torch.float64 if column.typecode == "d" else torch.int64
    return torch.frombuffer(bytearray(column.tobytes()), dtype=dtype) if column else torch.empty(0, dtype=dtype)
