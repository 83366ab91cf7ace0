"""A callback that writes the page of a run when a fit ends."""

from __future__ import annotations

from collections.abc import Iterator

from hocket import hookimpl
from hocket.basics.run_files import METRICS
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs.callback import Callback
from hocket.state.state import State


class Report(Callback):
    """Write ``report.html`` into the run's folder when a fit ends, also by an exception. The page needs no network.

    The page shows what ``loggers: [jsonl]`` has written. It never fails a run: if it cannot be written, a warning says why.
    Making the first page of an environment takes some seconds more, since its JavaScript is prepared then.

    Args:
        filename: the name of the file within the run's folder.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20, duration="1ep", loggers=["jsonl"],
        ...     callbacks=["report"],
        ... )
        >>> (trainer.fit().run_folder / "report.html").exists()
        True
    """

    def __init__(self, filename: str = "report.html") -> None:
        self.filename = filename
        self._began = False

    def fit_start(self, state: State) -> None:
        """Note that there is something to report."""
        self._began = True

    @hookimpl(wrapper=True)
    def after_fit(self, state: State) -> Iterator[None]:
        """Write the page once the loggers have written all they have."""
        yield
        self._write(state)

    @hookimpl(wrapper=True)
    def exception(self, state: State) -> Iterator[None]:
        """Write the page once the loggers have noted the exception."""
        yield
        self._write(state)

    def _write(self, state: State) -> None:
        if not self._began or state.strategy.rank != 0 or not state.folder.lasting:
            return
        self._began = False
        from hocket_report.page import write

        folder = state.folder.path
        try:
            if not (folder / METRICS).exists():
                raise WrongValue(
                    f"there is no {METRICS} in {folder}. Write loggers: [jsonl] beside callbacks: [report]."
                )
            write([folder], folder / self.filename)
        except Exception as error:
            warn(f"The report of this run was not written: {error}")
