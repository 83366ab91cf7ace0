"""Write predictions while they are computed, a shard at a time."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket.basics.run_folder import is_url
from hocket.data.source import empty, limited
from hocket.errors import WrongValue
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.callback import Callback
from hocket.loop.agreement import ranks_of
from hocket.state.step import count
from hocket_checkpoints.weights import write_tensors
from hocket_tools.arguments import check_least, checked
from hocket_tools.beside import explained
from hocket_tools.judging import predictions
from hocket_tools.judging.ordered import Sharded
from hocket_tools.judging.predictions import Format
from hocket_tools.judging.recording import nonfinite, say_nonfinite
from hocket_tools.progress import Progress, say
from hocket_tools.reproducing import digests
from hocket_tools.reproducing.environment import code
from hocket_tools.writable import writing

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer
    from hocket.state.state import State

_CONTINUES = ": the same command continues after its complete files"


@checked
@explained("The prediction")
def predict_into(
    trainer: Trainer,
    data: Any,
    folder: str | Path,
    *,
    format: Format = "npz",
    batches_per_file: int = 64,
    checkpoint: str | None = None,
    name: str = "",
    overwrite: bool = False,
) -> int:
    """Write the model's outputs for every sample into a folder, and return the number of rows.

    Rows are in the order of the data. A file holds the outputs of ``batches_per_file`` batches, and no more than that is in
    memory; each rank writes every n-th file, so that any number of ranks writes the same files. Files appear complete or not at
    all: a call that is repeated after a kill keeps the complete ones, and writes the others with the same bytes. It is refused
    if weights, model, options, imported source files, or the first and last samples are others. All ranks call it, with one
    folder that they share.

    Args:
        trainer: with the model and its weights.
        data: any iterable of batches, the same on all ranks. Of a DataLoader over a map-style data set, files that are there
            are not loaded again, and a column ``index`` has the indices of the samples.
        folder: a new folder, or one that this call began earlier.
        format: ``"npz"``, ``"parquet"`` or ``"jsonl"``.
        batches_per_file: 1 or more.
        checkpoint: whose weights to use; None for the Trainer's.
        name: what the data are called; files of other data are not continued.
        overwrite: whether to replace predictions of other weights, data or options.

    Raises FileExistsError for a folder with other files, or with other predictions, and ValueError for data without samples,
    and for outputs without a row for each sample.

    Example:
        >>> import pathlib, tempfile, hocket, torch
        >>> from hocket_tools import predict_into
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 2), device="cpu")
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "predictions"
        >>> predict_into(trainer, [torch.ones(8, 4), torch.ones(3, 4)], folder, format="jsonl", batches_per_file=1)
        11
        >>> sorted(each.name for each in folder.iterdir())
        ['part-000000.jsonl', 'part-000001.jsonl', 'predictions.json']
    """
    check_least(1, 64, batches_per_file=batches_per_file)
    if is_url(str(folder)):
        raise WrongValue(
            f"{folder} is a URL, and predictions are written to a disk. Name a folder, and copy it afterwards."
        )
    state = trainer.state
    bus, strategy, run, folder = state.bus, state.strategy, state.run_name, Path(folder)
    replicas = bus.all_gather_object(strategy.data_rank)
    writes = replicas.index(strategy.data_rank) == strategy.rank
    with ExitStack() as held, reading(trainer, data, batches_per_file, checkpoint, name) as (sharded, read):
        made_of = {**read, "format": format, "batches_per_file": batches_per_file}
        with writing(folder, _CONTINUES):
            ranks_of(state).first(
                lambda: predictions.begin(folder, {**made_of, "samples": sharded.samples()}, overwrite, run, held)
            )
        sharded.done = list(ranks_of(state).first(lambda: predictions.done(folder, format, say)))
        if sharded.done:
            say(f"{len(sharded.done)} files in {folder} are complete, and are kept.", strategy.rank)
        writer = _Writer(sharded, folder, format, batches_per_file, writes)
        attached = Attachment("callbacks", "prediction-files", writer)
        bus.attach(attached)
        try:
            trainer.predict(sharded, keep=False)
        finally:
            writer.progress.clear()
            bus.detach(attached)
        numbers, where = zip(*bus.all_gather_object(writer.nonfinite), strict=True)  # until all ranks have written
        with writing(folder, _CONTINUES):
            rows: int = ranks_of(state).first(lambda: predictions.finish(folder, format))
    if not rows:
        raise empty(data, f"The data '{name}'" if name else "The data", "eval_data", "sample")
    if strategy.rank == 0:
        say_nonfinite(sum(numbers), [each for rank in where for each in rank][:5], rows)
    return rows


@explained("The prediction")
def predict_into_file(trainer: Trainer, data: Any, out: str, checkpoint: str | None, name: str, overwrite: bool) -> int:
    """Write one tensor with the rows of all batches, and return their number."""
    if (ranks := trainer.state.strategy.world_size) > 1:
        raise WrongValue(
            f"--out writes one file, and there are {ranks} ranks. Write --to FOLDER, or start one process."
        )
    with reading(trainer, data, 1, checkpoint, name) as (read, made_of):
        made_of["samples"] = read.samples()
        predictions.check_file(out, made_of, overwrite)
        outputs = trainer.predict(read)
    if not all(isinstance(each, torch.Tensor) for each in outputs):
        raise WrongValue(
            "The model's output is not a tensor; --out writes one tensor only. Write --to FOLDER, which writes the parts of "
            "outputs as columns."
        )
    if not (rows := sum(map(len, outputs))):
        raise empty(data, "The data to predict on", "eval_data", "sample")
    if differ := predictions.check_file(out, made_of, overwrite):  # again: another process may have written it
        say(f"{out} had {differ}, which are replaced.")
    joined = torch.cat(outputs).contiguous()
    with writing(out):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_tensors({"outputs": joined}, Path(out), {"made_of": json.dumps(made_of)})
    where = nonfinite(joined, rows).nonzero().flatten().tolist()
    say_nonfinite(len(where), [f"row {row}" for row in where[:5]], rows)
    return rows


@contextmanager
def reading(
    trainer: Trainer, data: Any, size: int, checkpoint: str | None, name: str
) -> Iterator[tuple[Sharded, dict[str, Any]]]:
    """Enter the weights of a checkpoint; yield data for one call of ``predict``, in order, and what its outputs are made of."""
    state, settings = trainer.state, trainer.settings
    strategy, before = state.strategy, settings.limit_predict
    limit = limited(data, before, "limit_predict")
    sharded = Sharded(data, size, strategy.data_rank, strategy.data_ranks, limit, state.bus.broadcast_object)
    read = {"name": name, "limit": limit, "batches": sharded.batches, "type": type(data).__name__}
    with nullcontext() if checkpoint is None else trainer._weights_of(checkpoint):
        made_of = {
            "weights": digests.digest(trainer.model_state_dict(evaluated=True)),
            "model": digests.digest(re.sub(r" at 0x\w+", "", repr(state.model))),
            "code": code(),
            "data": digests.digest(repr(read)),
            "precision": type(state.precision).__name__,
        }
        vars(settings).update(limit_predict=None)  # it is of all batches, not of a rank's
        try:
            yield sharded, made_of
        finally:
            vars(settings).update(limit_predict=before)


class _Writer(Callback):
    """Write a file after the last batch of each of this rank's shards."""

    def __init__(self, sharded: Sharded, folder: Path, suffix: str, size: int, writes: bool) -> None:
        self._sharded, self._folder, self._suffix, self._size, self._writes = sharded, folder, suffix, size, writes
        #: The numbers of this rank's batches, and the columns of the shard's batches.
        self._numbers, self._waiting = filter(sharded.own, itertools.count()), list[Any]()
        self._say = functools.cache(lambda text: say(text, sharded._rank if writes else -1))
        self.progress, self._total = (
            Progress(writes and sharded._rank == 0),
            sum(map(sharded.own, range(sharded.length))),
        )
        self._shard = -1
        #: How many rows with NaN or infinity were written, and where the first ones are.
        self.nonfinite: tuple[int, list[str]] = (0, [])

    def predict_after_forward(self, state: State) -> None:
        """Keep the outputs of a batch until its file is complete."""
        number, samples = next(self._numbers), count(state, state.batch).samples
        if number >= self._sharded.length or not samples:  # padding, or nothing
            return
        shard = number // self._size
        if shard != self._shard:
            self._flush()
            self._shard = shard
        columns = predictions.columns_of(state.outputs, samples, self._say)
        indices: Any = None if self._sharded.batches is None else self._sharded.batches[number]
        of_samples = isinstance(indices, list | tuple) and len(indices) == samples
        if of_samples and all(isinstance(each, int) for each in indices):
            import numpy as np

            columns = {"index": np.array(indices, np.int64), **columns}
        if self._waiting and columns.keys() != self._waiting[0].keys():
            raise WrongValue(
                f"The model returned the outputs {', '.join(self._waiting[0])} for one batch and {', '.join(columns)} for "
                "another, so they are not columns of one table. Return the same ones for each batch."
            )
        if self._writes:
            self._note_nonfinite(nonfinite(state.outputs, samples).nonzero().flatten().tolist(), columns)
        self._waiting.append(columns)
        self.progress.step("batches", self._total or None)

    def _note_nonfinite(self, rows: list[int], columns: Mapping[str, Any]) -> None:
        (number, where), file = self.nonfinite, predictions.file_name(self._shard, self._suffix)
        before = sum(len(next(iter(each.values()))) for each in self._waiting)
        index = columns.get("index")
        named = [f"row {before + row} of {file}" if index is None else f"sample {index[row]}" for row in rows[:5]]
        self.nonfinite = number + len(rows), [*where, *named][:5]

    def predict_end(self, state: State) -> None:
        """Write the last file."""
        self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        name = predictions.file_name(self._shard, self._suffix)
        columns = {each: predictions.concatenated(self._waiting, each) for each in self._waiting[0]}
        self._waiting = []
        if self._writes:
            with writing(self._folder, _CONTINUES):
                predictions.note_columns(self._folder, columns)
                predictions.write(self._folder / name, columns, self._suffix)
