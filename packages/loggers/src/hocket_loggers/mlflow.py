"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hocket import Logger, State
from hocket_loggers.vendor_records import Written, flat, pixels, position, relative, require

if TYPE_CHECKING:
    from mlflow import MlflowClient

#: The tag with the identity of hocket's run, by which a resumed run finds its run of MLflow.
_TAG = "hocket.run"
#: What one request may contain.
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER, _LONGEST_NAME = 1000, 100, 6000, 250


class MLflowLogger(Logger):
    """Write to MLflow: a folder (``file:…``), a database (``sqlite:///mlflow.db``) or a server (``http://…``).

    The step is the number of batches trained on; the metrics ``epoch``, ``sample``, ``token`` and ``seconds`` have the rest of
    the position. Waiting rows are sent together, up to 1000 values in a request. Hyperparameters become parameters, and
    with all their structure the file ``hyperparameters.json``: MLflow cannot change a parameter, so a resumed run adds
    only new ones. Images become PNG files, tables JSON files as of ``mlflow.log_table``, texts Markdown files and histograms
    JSON files with ``counts`` and ``edges``, each at ``name/batch``. Characters that MLflow refuses in names become ``_``.
    Databases store infinities as ±1.8e308. Newer versions read a folder only with ``MLFLOW_ALLOW_FILE_STORE=true`` in the
    environment, also in ``mlflow ui``; this logger sets it for its own process.

    A resumed run continues the run of MLflow whose tag ``hocket.run`` has its identity. Values that a killed process wrote
    after the checkpoint are kept, and not written again.

    Args:
        tracking_uri: where to; None for that of ``MLFLOW_TRACKING_URI``, or MLflow's default.
        experiment: the name of the experiment, which is created if it does not exist.
        tags: tags of a new run.

    Raises:
        ModuleNotFoundError: the package mlflow is not installed.

    Example:
        >>> import hocket
        >>> trainer = hocket.Trainer(
        ...     model=net, loss=loss, optimizer="sgd(lr=0.1)", train_data=data, duration="1ep",
        ...     loggers=[{"mlflow": {"tracking_uri": "sqlite:///mlflow.db"}}],
        ... )  # doctest: +SKIP
    """

    deadline = 30.0

    def __init__(
        self, tracking_uri: str | None = None, experiment: str = "hocket", tags: Mapping[str, str] | None = None
    ) -> None:
        require("mlflow", "mlflow")
        self._uri, self._experiment, self._tags = tracking_uri, experiment, dict(tags or {})
        self._client: MlflowClient | None = None
        self._run = ""
        self._written = Written()
        #: Whether this process has begun or continued the run before.
        self._began = False
        self._failed = False

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """Write parameters that the run does not have, and ``hyperparameters.json``."""
        from mlflow.entities import Param

        client = self._open(state)
        known = client.get_run(self._run).data.params
        values = {_name(name): str(value)[:_LONGEST_PARAMETER] for name, value in flat(parameters)}
        new = [Param(name, value) for name, value in values.items() if name not in known]
        for first in range(0, len(new), _MOST_PARAMETERS):
            client.log_batch(self._run, params=new[first : first + _MOST_PARAMETERS])
        client.log_dict(self._run, dict(parameters), "hyperparameters.json")

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """See :meth:`hocket.hookspecs.Loggers.log_metrics`."""
        self.log_rows([(state, metrics)])

    def log_rows(self, rows: Sequence[tuple[State, Mapping[str, float]]]) -> None:
        """Write several rows in few requests."""
        from mlflow.entities import Metric

        client, now = self._open(rows[0][0]), int(time.time() * 1000)
        values = []
        for state, metrics in rows:
            step, where = state.timestamp.batch, position(state)
            named = where | {
                _name(f"metric/{name}" if name in where else name): value for name, value in metrics.items()
            }
            new = self._written.missing(step, named) if metrics else {}
            values += [Metric(name, value, now, step) for name, value in new.items()]
        for first in range(0, len(values), _MOST_METRICS):
            client.log_batch(self._run, metrics=values[first : first + _MOST_METRICS])

    def log_images(self, state: State, name: str, images: Sequence[Any]) -> None:
        """Write ``name/batch-0.png``, ``name/batch-1.png`` …"""
        client = self._open(state)
        for number, image in enumerate(images):
            file = f"{_name(name)}/{state.timestamp.batch}-{number}.png"
            client.log_image(self._run, pixels(image), artifact_file=file)

    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write ``name/batch.json``, which pandas reads with ``read_json(file, orient="split")``."""
        self._log_json(state, name, {"columns": list(columns), "data": [list(row) for row in rows]})

    def log_text(self, state: State, name: str, text: str) -> None:
        """Write ``name/batch.md``."""
        self._open(state).log_text(self._run, text, f"{_name(name)}/{state.timestamp.batch}.md")

    def log_histogram(self, state: State, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """Write ``name/batch.json`` with counts and edges."""
        self._log_json(state, name, {"counts": list(counts), "edges": list(edges)})

    def log_artifact(self, state: State, name: str, path: Path) -> None:
        """Upload a file or a folder below ``name``."""
        client = self._open(state)
        upload = client.log_artifacts if path.is_dir() else client.log_artifact
        upload(self._run, str(path), artifact_path=_name(name))

    def _log_json(self, state: State, name: str, content: dict[str, Any]) -> None:
        self._open(state).log_dict(self._run, content, f"{_name(name)}/{state.timestamp.batch}.json")

    def exception(self, state: State) -> None:
        """Have the run end as failed."""
        self._failed = True

    def close(self, state: State) -> None:
        """Mark the run as ended; later values continue it."""
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._run, "FAILED" if self._failed else "FINISHED")
        self._failed = False

    def _open(self, state: State) -> MlflowClient:
        if self._client is None:
            from mlflow import MlflowClient

            if urlsplit(self._uri or os.environ.get("MLFLOW_TRACKING_URI", "")).scheme in ("", "file"):
                # MLflow 3.17 refuses folders otherwise, in this process and in what reads them.
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            client = MlflowClient(tracking_uri=self._uri)
            found = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
            runs = client.search_runs([experiment], f"tags.`{_TAG}` = '{state.run.id}'", max_results=1)
            last: dict[str, int] = {}
            if not runs:
                run = client.create_run(experiment, tags={**self._tags, _TAG: state.run.id}, run_name=state.run_name)
            else:
                run = runs[0]
                client.update_run(run.info.run_id, "RUNNING")
                for name in () if self._began else run.data.metrics:
                    last[name] = max(metric.step for metric in client.get_metric_history(run.info.run_id, name))
            self._run, self._written, self._began = run.info.run_id, Written(last), True
            self._client = client
        return self._client


def _name(name: str) -> str:
    """Return a name that MLflow accepts on all systems."""
    return relative(re.sub(r"[^\w.\- /]", "_", name))[:_LONGEST_NAME]
