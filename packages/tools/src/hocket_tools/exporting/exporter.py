"""Export the model of a Trainer, verify the files, and describe them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hocket.basics import safe_files, seeding
from hocket.basics.run_files import content, strict
from hocket.errors import ExistingFile
from hocket.loop.agreement import ranks_of
from hocket.state.state import State
from hocket_checkpoints.storage import scratch
from hocket_tools import arguments
from hocket_tools.exporting import manifest
from hocket_tools.exporting.axes import Dynamic
from hocket_tools.exporting.formats import Format, HowAdapters, Subject, To
from hocket_tools.exporting.observing import Predict
from hocket_tools.exporting.preparing import Facts, Options, prepare
from hocket_tools.exporting.verification import TOLERANCE, Comparison, ExportDiffers, Sample, cause, compare
from hocket_tools.progress import say
from hocket_tools.writable import check_other, check_place, exchanged, writing

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer

#: The files beside an export.
MANIFEST, VERIFICATION = "export.json", "verification.json"


@dataclass(frozen=True)
class Exported:
    """An export: its folder, its description (``export.json``), and how much it differs from the predictions of the run."""

    folder: Path
    manifest: Mapping[str, Any]
    comparisons: Sequence[Comparison]

    @property
    def difference(self) -> float:
        """The largest absolute difference."""
        return self.worst.difference

    @property
    def worst(self) -> Comparison:
        """The comparison with the largest difference."""
        return max(self.comparisons, key=lambda comparison: comparison.difference)


@arguments.checked
def export(
    trainer: Trainer,
    to: To = "torch-export",
    out: str | Path | None = None,
    *,
    checkpoint: str | Path | None = None,
    data: Iterable[Any] | None = None,
    adapters: HowAdapters = "merged",
    dynamic: Dynamic | None = None,
    overwrite: bool = False,
) -> Exported:
    """Export the model with the weights that evaluation uses, such as the averages of EMA, and verify the files.

    The files are run on 1 and 7 samples of the evaluation data, and on inputs of another length, and compared with
    ``trainer.predict``. If a difference is above 1e-4, relative to outputs above 1, or the model cannot be exported, nothing is
    left. The number of samples is dynamic, and so is axis 1 of inputs ``(B, L)`` of integers, unless the model fixes it.
    What a loss alone needs, such as ``labels``, is not an input.

    Args:
        to: ``"torch-export"``, ``"onnx"``, ``"safetensors"`` or ``"huggingface"``.
        out: the folder to write, which an earlier export of this run may have; by default ``exports/<to>`` in the folder of
            the run. A killed process leaves the earlier or the new export, where the system exchanges folders (Linux, macOS).
        checkpoint: ``"best"``, ``"latest"`` or the path of a checkpoint whose weights to export, as in ``trainer.predict``.
        data: batches to verify with; by default the first evaluation set.
        adapters: ``"merged"`` into the weights, or ``"apart"``.
        dynamic: further axes that vary, by input: ``{"x": [2, 3]}``.
        overwrite: whether to replace an export of another run.

    Raises:
        hocket.errors.Unsupported: the model cannot be exported; the message names the line.
        hocket.errors.MissingPackage: a library of the format is not installed.
        FloatingPointError: the files compute something else.
        FileExistsError: ``out`` is something else than an earlier export of this run.

    Example:
        >>> import hocket, hocket_tools, tempfile, torch
        >>> data = [(torch.randn(8, 4), torch.randn(8, 1))]
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), loss="mse_loss", eval_data=data, device="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     exported = hocket_tools.export(trainer, "torch-export", f"{folder}/linear")
        ...     module = torch.export.load(f"{folder}/linear/model.pt2").module()
        >>> module(input=torch.ones(3, 4)).shape
        torch.Size([3, 1])
    """
    options = Options(to, adapters, dynamic or {}, None if checkpoint is None else os.fspath(checkpoint), overwrite)
    return export_trainer(trainer, options, out, data)


def export_trainer(
    trainer: Trainer, options: Options, out: str | Path | None = None, data: Iterable[Any] | None = None
) -> Exported:
    """Implement `export`."""
    state = trainer.state
    if data is None:
        trainer._data.make("eval", running=trainer._running)

    def predict(batches: Sequence[Any]) -> list[Any]:
        """Predict each batch on every rank, one by one: ``limit_predict=`` limits each."""
        every = [[batch] * state.strategy.data_ranks for batch in batches]
        return [output for same in every for output in trainer.predict(same, checkpoint=options.checkpoint)]

    return export_state(state, predict, options, out, data)


def export_state(
    state: State, predict: Predict, options: Options, out: str | Path | None = None, data: Iterable[Any] | None = None
) -> Exported:
    """Implement `export` for a state, also during a fit. Every rank calls it, and rank 0 writes."""
    folder = check_folder(state, options, out)
    with seeding.preserved():  # what reads weights may make a model first
        format, subject, verified, facts = prepare(state, predict, options, data)
        options.stage(f"converting to {options.to}")
        built = format.build(subject)
        if out is None:
            state.folder.claim()
        return ranks_of(state).first(lambda: written(format, built, subject, verified, facts, options, folder))


def check_folder(state: State, options: Options, out: str | Path | None) -> Path:
    """Return the folder to write. Raises WrongFile or ExistingFile on all ranks; see `checked`."""
    folder = state.folder.path / "exports" / options.to if out is None else out
    whose = None if options.overwrite else state.run.id
    return ranks_of(state).first(lambda: checked(folder, whose, options.to, state.folder.path))


def written(
    format: Format, built: Any, subject: Subject, verified: list[Sample], facts: Facts, options: Options, folder: Path
) -> Exported:
    """Write the files, run them, and give them their name if they compute what the run predicts."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        hidden = scratch.begin(folder.parent, f".{folder.name}.hocket-export-")
        (temporary := hidden / folder.name).mkdir()  # with the mode of any folder
    try:
        options.stage("writing")
        with torch.no_grad(), writing(folder):
            format.write(built, subject, temporary)
        options.stage("running what was written")
        try:
            comparisons = compare(format.load(subject, temporary), verified, subject.axes)
        except ExportDiffers as error:
            raise ExportDiffers(f"{error}{cause(subject.model, verified)} Nothing was left in {folder}.") from error
        description = describe(subject, verified, options, facts)
        with writing(folder):
            _write(temporary / MANIFEST, description)
            _write(temporary / VERIFICATION, _verification(comparisons, options, facts))
            _replace(folder, temporary, facts.origin["id"], options)
    finally:
        scratch.end(hidden)
    return Exported(folder, description, comparisons)


def checked(folder: str | Path, whose: str | None, to: str, run: Path | None = None) -> Path:
    """Return a folder as an absolute path, where a link leads.

    Args:
        whose: the id of the run whose earlier export ``to`` the same format may be replaced; None for all exports.
        run: the folder of the run, which may not exist yet.

    Raises:
        hocket.errors.ExistingFile: something else is there than such an export, or the run will be.
        hocket.errors.WrongFile: it cannot be written.
    """
    path = Path(folder).expanduser().absolute()
    path = path.resolve() if path.is_symlink() else path
    if run is not None and path in (run.absolute(), *run.absolute().parents):
        raise ExistingFile(
            f"{path} has the run itself, and an export is a folder of its own. Write out={path / 'export'}."
        )
    check_place(path, (path / MANIFEST).is_file(), "an earlier export")
    check_other(path, "" if whose is None else _earlier(path, whose, to), False)
    return path


def _earlier(folder: Path, whose: str, to: str) -> str:
    """Return what an earlier export is, if it is of another run or in another format; else an empty text."""
    there = content(folder / MANIFEST)
    origin, format = there.get("origin") or {"id": whose}, there.get("format", to)
    if origin.get("id") != whose:
        return f"an export of run {origin.get('run')} ({origin.get('id')}), and this one is of another run"
    return "" if format == to else f"an export to {format}, and this one is to {to}"


def describe(subject: Subject, verified: Sequence[Sample], options: Options, facts: Facts) -> dict[str, Any]:
    """Return the content of ``export.json``."""
    outputs = [subject.model.outputs(sample.inputs) for sample in verified]
    output_axes = manifest.output_axes(outputs, [sample.sizes(subject.axes) for sample in verified])
    return {
        "format": options.to, "model": type(subject.model.network).__name__,
        "inputs": manifest.tensors_as_json(subject.inputs, subject.axes),
        "outputs": manifest.tensors_as_json(outputs[0], output_axes),
        "left_out": {"inputs": list(facts.unused), "outputs": list(facts.left_out)},
        "classes": facts.classes, "preprocessing": list(facts.preprocessing),
        "adapters": options.adapters if facts.has_adapters else None,
        "origin": dict(facts.origin), "versions": manifest.versions(),
    }  # fmt: skip


def _verification(comparisons: Sequence[Comparison], options: Options, facts: Facts) -> dict[str, Any]:
    return {
        "format": options.to,
        "compared_with": facts.reference,
        "tolerance": TOLERANCE,
        "difference": max(comparison.difference for comparison in comparisons),
        "difference_of_precision": facts.rounding,
        "batches": [comparison.as_dict() for comparison in comparisons],
    }


def _write(file: Path, values: Mapping[str, Any]) -> None:
    safe_files.replace(file, json.dumps(strict(values), indent=1) + "\n")


def _replace(folder: Path, temporary: Path, whose: str, options: Options) -> None:
    """Put the new folder in place of an earlier one, also of another process, and say if that is another one."""
    for _ in range(9):
        with suppress(OSError):
            temporary.rename(folder)
            return
        checked(folder, None if options.overwrite else whose, options.to)
        earlier = _earlier(folder, whose, options.to)
        if exchanged(temporary, folder):
            if earlier:
                say(f"{folder} had {earlier}: it is replaced.")
            return
        with suppress(FileNotFoundError):  # another process has moved it
            folder.rename(temporary.with_name(os.urandom(8).hex()))
    temporary.rename(folder)
