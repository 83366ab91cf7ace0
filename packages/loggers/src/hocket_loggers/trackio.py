"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import Logger, State
from hocket_loggers.vendor_records import Written, pixels, position, require

if TYPE_CHECKING:
    import trackio


class TrackioLogger(Logger):
    """Write to Trackio's local database, for ``trackio show``, or to a server of Trackio.

    The step is the number of batches trained on; each row has ``epoch``, ``sample``, ``token`` and ``seconds`` too.
    Hyperparameters become the config, and images, tables, histograms, Markdown texts and artifacts those of Trackio. The
    local database is in ``TRACKIO_DIR``, not in the run's folder. Trackio sends rows from a thread of its own; what a server
    that cannot be reached should have got, it stores in the local database.

    The run at Trackio has the name of hocket's run and the beginning of its id, by which a resumed run continues it. Values
    that a killed process wrote after the checkpoint are kept in the local database, and not written again; a server keeps both.

    Args:
        project: the project at Trackio.
        server_url: the address of a server, with its write token; None for the local database.

    Raises:
        ModuleNotFoundError: the package trackio is not installed.

    Example:
        >>> import hocket
        >>> trainer = hocket.Trainer(
        ...     model=net, loss=loss, optimizer="sgd(lr=0.1)", train_data=data, duration="1ep", loggers=["trackio"],
        ... )  # doctest: +SKIP
    """

    deadline = 30.0

    def __init__(self, project: str = "hocket", server_url: str | None = None) -> None:
        require("trackio", "trackio")
        self._project, self._server_url = project, server_url
        self._config: dict[str, Any] = {}
        self._run: trackio.Run | None = None
        self._written = Written()
        #: Whether this process has begun or continued the run before.
        self._began = False

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """Set the run's config."""
        self.close(state)  # Trackio takes the config when a run begins or continues
        self._config = dict(parameters)
        self._open(state)

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """See :meth:`hocket.hookspecs.Loggers.log_metrics`."""
        where = position(state)
        self._log(state, {f"metric/{name}" if name in where else name: value for name, value in metrics.items()})

    def log_images(self, state: State, name: str, images: Sequence[Any]) -> None:
        """Write images as ``name/0``, ``name/1`` …"""
        import trackio

        self._log(state, {f"{name}/{number}": trackio.Image(pixels(image)) for number, image in enumerate(images)})

    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table."""
        import trackio

        self._log(state, {name: trackio.Table(columns=list(columns), data=[list(row) for row in rows])})

    def log_text(self, state: State, name: str, text: str) -> None:
        """Write Markdown."""
        import trackio

        self._log(state, {name: trackio.Markdown(text)})

    def log_histogram(self, state: State, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """Write a histogram."""
        import trackio

        self._log(state, {name: trackio.Histogram(np_histogram=(list(counts), list(edges)))})

    def log_artifact(self, state: State, name: str, path: Path) -> None:
        """Write a file or a folder as a version of an artifact."""
        import re

        self._open(state).log_artifact(str(path), name=re.sub(r"[^\w.-]", "-", name) or "unnamed", type="file")

    def _log(self, state: State, values: Mapping[str, Any]) -> None:
        run, step = self._open(state), state.timestamp.batch
        if new := self._written.missing(step, values):
            run.log(position(state) | new, step=step)

    def close(self, state: State) -> None:
        """Write pending rows and end the run; later values continue it."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _open(self, state: State) -> trackio.Run:
        if self._run is None:
            import trackio

            name = f"{state.run_name}-{state.run.id[:8]}"
            self._run = trackio.init(
                self._project, name, server_url=self._server_url, resume="allow", config=self._config, embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
            last: dict[str, int] = {}
            if self._server_url is None and not self._began:
                for row in trackio.SQLiteStorage.get_logs(self._project, name):
                    last |= dict.fromkeys(row, row["step"])
            self._written, self._began = Written(last), True
        return self._run
