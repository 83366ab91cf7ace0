"""TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import Logger
from hocket_loggers.vendor_records import Written, flat, markdown, require

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from hocket import State


class TensorBoardLogger(Logger):
    """Write event files for ``tensorboard --logdir runs``; the step is the number of batches trained on.

    Numbers become 32-bit scalars, images become images, histograms histograms, and texts, tables and the paths of finished
    artifacts become texts.
    Hyperparameters become a text and a row of the HParams page. If a run resumes before its last written value, TensorBoard
    hides the values that are written again.

    Args:
        folder: parent folder of the event files, which get a subfolder named like the run; None for ``tensorboard`` in the
            run's own folder.
        flush_seconds: seconds that a value may stay in memory.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.

    Example:
        >>> import hocket, hocket_loggers, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 10, loggers=[hocket_loggers.TensorBoardLogger()],
        ... )
        >>> result = trainer.fit()
    """

    def __init__(self, folder: str | Path | None = None, flush_seconds: int = 30) -> None:
        require("tensorboard", "tensorboard")
        self._folder = None if folder is None else Path(folder)
        self._flush_seconds = flush_seconds
        self._open: SummaryWriter | None = None
        #: The batch at which a fit began or resumed, until the event file is closed.
        self._start: int | None = None
        #: The values up to there that an earlier process wrote, or None before this one has written any.
        self._written: Written | None = None

    def fit_start(self, state: State) -> None:
        """Note the batch: what an earlier process wrote after it is written again."""
        if self._open is None:
            self._start = state.timestamp.batch

    # --- writing

    def log_hyperparameters(self, state: State, parameters: Mapping[str, Any]) -> None:
        """Write a text, and for the HParams page flattened numbers and strings, without None."""
        from torch.utils.tensorboard.summary import hparams

        writer = self._writer(state)
        text = json.dumps(parameters, indent=2, default=str)
        writer.add_text("hyperparameters", f"```json\n{text}\n```", state.timestamp.batch)
        # Write the values only: TensorBoard finds the metrics itself, and the final metrics are not known yet.
        _, values, _ = hparams(dict(flat(parameters)), {})
        # add_hparams would write them into a separate run.
        writer.file_writer.add_summary(values)  # type: ignore[attr-defined]  # there since the line above

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """See :meth:`hocket.hookspecs.Loggers.log_metrics`."""
        writer, step = self._writer(state), state.timestamp.batch
        assert self._written is not None
        # A checkpoint may have been written before or after the values of its batch.
        for name, value in self._written.missing(step, metrics).items():
            writer.add_scalar(name, value, step)

    def log_images(self, state: State, name: str, images: Sequence[Any]) -> None:
        """Write images one by one as ``name/0``, ``name/1`` …, so that they may differ in size."""
        writer, step = self._writer(state), state.timestamp.batch
        for number, image in enumerate(images):
            # The writer converts to NumPy, which has no bfloat16.
            writer.add_image(f"{name}/{number}", image.float() if image.is_floating_point() else image, step)

    def log_table(self, state: State, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write the table as a Markdown text."""
        self._writer(state).add_text(name, markdown(columns, rows), state.timestamp.batch)

    def log_text(self, state: State, name: str, text: str) -> None:
        """See :meth:`hocket.hookspecs.Loggers.log_text`."""
        self._writer(state).add_text(name, text, state.timestamp.batch)

    def log_histogram(self, state: State, name: str, counts: Sequence[float], edges: Sequence[float]) -> None:
        """Write the bins. Sums, which the page does not show, are those of values in the middle of their bins."""
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        self._writer(state).add_histogram_raw(
            name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            bucket_limits=list(edges[1:]),
            bucket_counts=list(counts),
            global_step=state.timestamp.batch,
        )

    def log_artifact(self, state: State, name: str, path: Path) -> None:
        """Write the path as a text: event files cannot contain files."""
        self._writer(state).add_text(name, f"`{path}`", state.timestamp.batch)

    def flush(self, state: State) -> None:
        """See :meth:`hocket.hookspecs.Loggers.flush`."""
        if self._open is not None:
            self._open.flush()

    def close(self, state: State) -> None:
        """Close the event file; later values start another one in the same folder."""
        if self._open is not None:
            self._open.close()
            self._open = self._start = None
            self._written = Written()

    def _writer(self, state: State) -> SummaryWriter:
        if self._open is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = state.run_folder / "tensorboard" if self._folder is None else self._folder / state.run_name
            # TensorBoard then discards the values of an earlier run after the step at which this one starts.
            start = state.timestamp.batch if self._start is None else self._start
            before = [file.name for file in folder.glob("*tfevents*")]
            if self._written is None:
                self._written = Written(_last_steps(folder, start) if before and start else None)
            # It reads files in the order of their names, which begin with the second of their creation.
            if any(name.startswith(f"events.out.tfevents.{int(time.time()):010d}") for name in before):
                time.sleep(1 - time.time() % 1)
            self._open = SummaryWriter(
                str(folder),
                purge_step=start + 1,  # TensorBoard's reader in Python ignores the first of a run
                flush_secs=self._flush_seconds,
            )
        return self._open


def _last_steps(folder: Path, until: int) -> dict[str, int]:
    """Return the last step up to ``until`` at which the event files have a scalar, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    steps = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    return {name: max((step for step in each if step <= until), default=-1) for name, each in steps.items()}
