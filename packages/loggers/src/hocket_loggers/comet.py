"""Comet."""

from __future__ import annotations

import csv
import io
import json
import shutil
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import Logger, State
from hocket_loggers.vendor_records import Written, flat, pixels, position, require

if TYPE_CHECKING:
    from comet_ml import CometExperiment

#: Comet starts one experiment at a time.
_STARTING = threading.Lock()
#: What Comet logs by itself, into a process that hocket shares with others.
_AUTOMATIC = (
    "log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_details", "auto_output_logging",
    "auto_param_logging", "auto_metric_logging",
)  # fmt: skip


class CometLogger(Logger):
    """Write to Comet, or for a later ``comet upload`` into archives in the run's folder.

    The step is the number of batches trained on, and Comet's epoch that of the run; ``sample``, ``token`` and ``seconds`` are
    metrics. Hyperparameters become parameters, images images, tables CSV files, texts texts, and artifacts assets.
    Histograms become the asset ``name-batch.json`` with ``counts`` and ``edges``: Comet's own histograms are made of values.

    The key of the experiment is the id of hocket's run, so a resumed run continues it. Offline, each process writes an archive
    of its own, and a resumed run completes that of a killed one; values that are in these archives and after the
    checkpoint are not written again. Online, Comet keeps such values twice.

    Args:
        project: the project at Comet.
        workspace: the workspace; None for the default of the account.
        online: whether to send values, which needs ``COMET_API_KEY``, or to write archives.
        folder: where archives are; None for ``comet`` in the run's folder.

    Raises:
        ModuleNotFoundError: the package comet-ml is not installed.

    Example:
        >>> import hocket
        >>> trainer = hocket.Trainer(
        ...     model=net, loss=loss, optimizer="sgd(lr=0.1)", train_data=data, duration="1ep",
        ...     loggers=[{"comet": {"online": False}}],
        ... )  # doctest: +SKIP
    """

    deadline = 30.0

    def __init__(
        self,
        project: str = "hocket",
        workspace: str | None = None,
        online: bool = True,
        folder: str | Path | None = None,
    ) -> None:
        require("comet", "comet_ml")
        self._project, self._workspace, self._online = project, workspace, online
        self._folder = None if folder is None else Path(folder)
        self._experiment: CometExperiment | None = None
        self._written = Written()
        #: Whether this process has begun or continued the run before.
        self._began = False

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """Write parameters by ``outer/inner``."""
        self._open(state).log_parameters(dict(flat(parameters)), nested_support=False)

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """See :meth:`hocket.hookspecs.Loggers.log_metrics`."""
        experiment, now = self._open(state), state.timestamp
        where = position(state)
        del where["epoch"]
        named = where | {f"metric/{name}" if name in where else name: value for name, value in metrics.items()}
        if metrics and (new := self._written.missing(now.batch, named)):
            experiment.log_metrics(new, step=now.batch, epoch=now.epoch)

    def log_images(self, state: State, name: str, images: Sequence[Any]) -> None:
        """Write images named ``name/0``, ``name/1`` …"""
        from PIL import Image

        experiment = self._open(state)
        for number, image in enumerate(images):
            experiment.log_image(Image.fromarray(pixels(image)), name=f"{name}/{number}", step=state.timestamp.batch)

    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write the CSV file ``name-batch.csv``."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])  # Comet's log_table refuses an empty table
        file.seek(0)
        batch = state.timestamp.batch
        self._open(state).log_asset(file, file_name=f"{name}-{batch}.csv", step=batch)

    def log_text(self, state: State, name: str, text: str) -> None:
        """Write a text, with its name as metadata."""
        self._open(state).log_text(text, step=state.timestamp.batch, metadata={"name": name})

    def log_histogram(self, state: State, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """Write ``name-batch.json`` with counts and edges."""
        batch = state.timestamp.batch
        file = io.StringIO(json.dumps({"counts": list(counts), "edges": list(edges)}))
        self._open(state).log_asset(file, file_name=f"{name}-{batch}.json", step=batch)

    def log_artifact(self, state: State, name: str, path: Path) -> None:
        """Upload a file, or all files of a folder, below ``name``."""
        experiment = self._open(state)
        local, files = (path.parent, [path]) if path.is_file() else (path, sorted(path.rglob("*")))
        for file in files:
            if file.is_file():
                experiment.log_asset(
                    str(file), file_name=f"{name}/{file.relative_to(local).as_posix()}", step=state.timestamp.batch
                )

    def close(self, state: State) -> None:
        """Send pending values, or complete the archive; later values continue the experiment."""
        if self._experiment is not None:
            experiment, self._experiment = self._experiment, None
            experiment.end()
            self._note(state).unlink(missing_ok=True)

    def _open(self, state: State) -> CometExperiment:
        if self._experiment is None:
            import comet_ml

            folder = self._archives(state)
            last: dict[str, int] = {}
            if not self._online:
                folder.mkdir(parents=True, exist_ok=True)
                _complete(self._note(state))
                last = {} if self._began else _last_batches(folder, state.run.id)
            config = comet_ml.ExperimentConfig(
                name=state.run_name,
                offline_directory=str(folder),
                display_summary_level=0,
                **dict.fromkeys(_AUTOMATIC, False),
            )
            with _STARTING:
                experiment = comet_ml.start(
                    workspace=self._workspace, project_name=self._project, experiment_key=state.run.id,
                    mode="get_or_create", online=self._online, experiment_config=config,
                )  # fmt: skip
                comet_ml.config.set_global_experiment(None)  # `start` ends the experiment that stands there
            if not self._online:  # for `_complete`, if this process is killed
                experiment._write_experiment_meta_file()
                self._note(state).write_text(experiment.tmpdir)
            self._experiment, self._written, self._began = experiment, Written(last), True
        return self._experiment

    def _archives(self, state: State) -> Path:
        return state.run_folder / "comet" if self._folder is None else self._folder

    def _note(self, state: State) -> Path:
        """Return the file that names the temporary folder of an archive that is not complete."""
        return self._archives(state) / f"{state.run.id}.unfinished"


def _complete(note: Path) -> None:
    """Make an archive of the temporary folder that a killed process left."""
    if note.exists() and (folder := Path(note.read_text())).is_dir():
        shutil.make_archive(str(note.with_name(f"{note.stem}-{folder.name}")), "zip", folder)
        shutil.rmtree(folder)
    for archive in note.parent.glob(f"{note.stem}*.zip"):
        with zipfile.ZipFile(archive) as opened:
            empty = not opened.namelist()
        if empty:  # Comet makes the file when a process begins, and fills it when the process ends
            archive.unlink()
    note.unlink(missing_ok=True)


def _last_batches(folder: Path, key: str) -> dict[str, int]:
    """Return the last batch at which the archives of an experiment have a value, by name."""
    last: dict[str, int] = {}
    for metric in (metric for file in folder.glob(f"{key}*.zip") for metric in read(file)):
        last[metric["metricName"]] = max(metric["step"] or 0, last.get(metric["metricName"], 0))
    return last


def read(archive: Path) -> list[dict[str, Any]]:
    """Return the metrics in an offline archive: dicts with metricName, metricValue, step and epoch."""
    with zipfile.ZipFile(archive) as opened:
        lines = opened.read("messages.json").decode().splitlines()
    messages = []
    for line in lines:
        try:
            messages.append(json.loads(line))
        except ValueError:  # the last line of a killed process
            continue
    return [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
