"""Weights & Biases."""

from __future__ import annotations

import atexit
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hocket import Logger, State
from hocket.errors import WrongValue
from hocket_loggers.vendor_records import Written, pixels, position, require

if TYPE_CHECKING:
    import wandb


class WandbLogger(Logger):
    """Write to Weights & Biases, or for a later ``wandb sync`` into the run's folder.

    The x axis is ``batch``, and each row has ``epoch``, ``sample``, ``token`` and ``seconds`` too. Hyperparameters become the
    config, images, tables and histograms those of W&B, and texts HTML. Artifacts become artifacts of the type ``file``, whose
    name has ``-`` in place of unusual characters.

    The run's id at W&B is that of hocket's run, so a resumed run continues it. Rows that a killed process wrote after
    the checkpoint are kept, and not written again: they are looked up in the offline files, or in the summary of the run
    at W&B; there the values of its last batch may appear twice. W&B's service writes an offline file about every 15 seconds,
    so that file lacks what a killed process logged in its last seconds, unless the resumed run computes it again.

    Args:
        project: the project at W&B.
        entity: the user or team; None for the default of the account.
        mode: ``"online"`` or ``"offline"``; None for that of ``WANDB_MODE``, or online.
        folder: where W&B's folder ``wandb`` is; None for the run's folder.
        settings: of ``wandb.Settings``, such as ``{"x_disable_stats": True}``.

    Raises:
        ModuleNotFoundError: the package wandb is not installed.

    Example:
        >>> import hocket
        >>> trainer = hocket.Trainer(
        ...     model=net, loss=loss, optimizer="sgd(lr=0.1)", train_data=data, duration="1ep",
        ...     loggers=[{"wandb": {"project": "digits", "mode": "offline"}}],
        ... )  # doctest: +SKIP
    """

    deadline = 30.0

    def __init__(
        self,
        project: str = "hocket",
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        folder: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require("wandb", "wandb")
        if mode not in ("online", "offline", None):
            raise WrongValue(
                f"«mode={mode!r}»; give 'online', 'offline', or «None» for the environment variable WANDB_MODE."
            )
        self._project, self._entity, self._mode = project, entity, mode
        self._folder, self._settings = None if folder is None else Path(folder), dict(settings or {})
        self._run: wandb.Run | None = None
        self._written = Written()
        #: Whether this process has begun or continued the run before.
        self._began = False
        self._failed = False

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._open(state).config.update(dict(parameters), allow_val_change=True)

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """See :meth:`hocket.hookspecs.Loggers.log_metrics`."""
        run = self._open(state)
        where = {"batch": state.timestamp.batch, **position(state)}
        named = {_name(f"metric/{name}" if name in where else name): value for name, value in metrics.items()}
        if new := self._written.missing(state.timestamp.batch, named):
            run.log(where | new)

    def log_images(self, state: State, name: str, images: Sequence[Any]) -> None:
        """Write images."""
        import wandb

        if len(images):
            self._log(state, name, [wandb.Image(pixels(image)) for image in images])

    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table. Columns of several types are allowed."""
        import wandb

        data = [list(row) for row in rows]
        self._log(state, name, wandb.Table(columns=list(columns), data=data, allow_mixed_types=True))

    def log_text(self, state: State, name: str, text: str) -> None:
        """Write preformatted HTML."""
        import html

        import wandb

        self._log(state, name, wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False))

    def log_histogram(self, state: State, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """Write a histogram, of at most 512 bins."""
        import wandb

        self._log(state, name, wandb.Histogram(np_histogram=(list(counts), list(edges))))

    def log_artifact(self, state: State, name: str, path: Path) -> None:
        """Upload a file or a folder as a version of an artifact."""
        import re

        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:128] or "unnamed", type="file")
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
        self._open(state).log_artifact(artifact)

    def _log(self, state: State, name: str, value: Any) -> None:
        run = self._open(state)
        key = _name(name)
        if self._written.missing(state.timestamp.batch, {key: 0.0}):
            run.log({"batch": state.timestamp.batch, **position(state), key: value})

    def exception(self, state: State) -> None:
        """Have the run end as failed."""
        self._failed = True

    def close(self, state: State) -> None:
        """Upload pending rows and end the run; later values continue it."""
        self._finish()
        self._failed = False

    def _finish(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            atexit.unregister(self._finish)
            run.finish(exit_code=int(self._failed))

    def _open(self, state: State) -> wandb.Run:
        if self._run is None:
            import wandb

            parent = state.run_folder if self._folder is None else self._folder
            last = {} if self._began else _last_batches(parent / "wandb", state.run.id)
            # hocket may run several Trainers, and owns the output and the signals of the process.
            settings = wandb.Settings(**{"console": "off", "silent": True, **self._settings})
            excepthook = sys.excepthook
            run = wandb.init(
                project=self._project, entity=self._entity, mode=self._mode, dir=str(parent), id=state.run.id,
                name=state.run_name, resume="allow", reinit="create_new", settings=settings,
            )  # fmt: skip
            atexit.register(self._finish)  # before W&B ends its service, where a script ends without `close`
            sys.excepthook = excepthook  # W&B's own marks runs as failed, as `exception` does
            run.define_metric("batch", hidden=True)
            run.define_metric("*", step_metric="batch")
            if not (last or self._began) and run.resumed and isinstance(batch := run.summary.get("batch"), int):
                last = dict.fromkeys(run.summary.keys(), batch - 1)
            self._run, self._written, self._began = run, Written(last), True
        return self._run


def _name(name: str) -> str:
    return name or "unnamed"


def _last_batches(folder: Path, run: str) -> dict[str, int]:
    """Return the last batch at which offline files of a run have a value, by name."""
    last: dict[str, int] = {}
    for file in sorted(folder.glob(f"offline-run-*-{run}/run-{run}.wandb")):
        for row in read(file):
            for name in row if "batch" in row else ():
                name = name.removesuffix("/_type")  # of an image, a table or another object
                last[name] = max(int(row["batch"]), last.get(name, 0))
    return last


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of an offline file, without those that a killed process left incomplete.

    The file is a log of LevelDB, with a header of its own, and each record is a protocol buffer of W&B.
    Format: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    import json

    from wandb.proto import wandb_internal_pb2

    for record in _records(file.read_bytes()):
        history = wandb_internal_pb2.Record.FromString(record).history
        if history.item:
            # NaN and infinities are in the JSON, as Python writes them.
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def _records(data: bytes) -> Iterator[bytes]:
    block, offset, parts = 32768, 7, b""  # W&B's header has 7 bytes
    while offset + 7 <= len(data):
        if block - offset % block < 7:  # the rest of a block is too short for a header
            offset += block - offset % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        if kind == 0 or offset + 7 + length > len(data):
            return
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield parts
            parts = b""
