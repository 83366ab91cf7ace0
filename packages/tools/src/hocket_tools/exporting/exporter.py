"""Export the model of a Trainer, verify the files, and describe them."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.basics import safe_files
from hocket.basics.run_files import strict
from hocket.errors import ExistingFile, Unsupported, WrongValue
from hocket.state.state import State
from hocket_tools.exporting import adapters as adapters_of, graphs, manifest, samples
from hocket_tools.exporting.axes import Dynamic, halved, lengths, varying
from hocket_tools.exporting.formats import Format, Subject, format_of
from hocket_tools.exporting.named_tensors import named_tensors
from hocket_tools.exporting.observing import Observer, Predict, observed
from hocket_tools.exporting.portable import PortableModel
from hocket_tools.exporting.verification import TOLERANCE, Comparison, ExportDiffers, Sample, compare, difference

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer

#: The files beside an export.
MANIFEST, VERIFICATION = "export.json", "verification.json"


@dataclass(frozen=True)
class Options:
    """What to export, and how; the arguments of `export`."""

    to: str
    adapters: str = "merged"
    dynamic: Dynamic = field(default_factory=dict)
    checkpoint: str | None = None
    #: Called with a line for each stage, and each decision that was not asked for.
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Exported:
    """An export: its folder, its description (``export.json``), and how much it differs from the predictions of the run."""

    folder: Path
    manifest: Mapping[str, Any]
    comparisons: Sequence[Comparison]

    @property
    def difference(self) -> float:
        """The largest absolute difference."""
        return max(comparison.difference for comparison in self.comparisons)


def export(
    trainer: Trainer,
    to: str = "torch-export",
    out: str | Path | None = None,
    *,
    checkpoint: str | Path | None = None,
    data: Iterable[Any] | None = None,
    adapters: str = "merged",
    dynamic: Dynamic | None = None,
) -> Exported:
    """Export the model with the weights that evaluation uses, such as the averages of EMA, and verify the files.

    The files are run on 1 and 7 samples of the evaluation data, and on inputs of another length, and compared with
    ``trainer.predict``. If a difference is above 1e-4, relative to outputs above 1, or the model cannot be exported, nothing is
    left. The number of samples is dynamic, and so is axis 1 of inputs ``(B, L)`` of integers, unless the model fixes it.
    What a loss alone needs, such as ``labels``, is not an input.

    Args:
        to: ``"torch-export"``, ``"onnx"``, ``"safetensors"`` or ``"huggingface"``.
        out: the folder to write, which an earlier export may have; by default ``exports/<to>`` in the folder of the run.
        checkpoint: ``"best"``, ``"latest"`` or the path of a checkpoint whose weights to export, as in ``trainer.predict``.
        data: batches to verify with; by default the first evaluation set.
        adapters: ``"merged"`` into the weights, or ``"apart"``.
        dynamic: further axes that vary, by input: ``{"x": [2, 3]}``.

    Raises:
        hocket.errors.Unsupported: the model cannot be exported; the message names the line.
        hocket.errors.MissingPackage: a library of the format is not installed.
        FloatingPointError: the files compute something else.
        FileExistsError: ``out`` is something else than an earlier export.

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
    path = None if checkpoint is None else os.fspath(checkpoint)
    options = Options(to, adapters, dynamic or {}, path)
    return export_trainer(trainer, options, out, data)


def export_trainer(
    trainer: Trainer, options: Options, out: str | Path | None = None, data: Iterable[Any] | None = None
) -> Exported:
    """Implement `export`."""
    if data is None:
        trainer._data.make("eval", running=trainer._running)
        data = evaluation_data(trainer.state)

    def predict(batches: Sequence[Any]) -> list[Any]:
        outputs = [trainer.predict([batch], checkpoint=options.checkpoint) for batch in batches]
        return [output for each in outputs for output in each]

    return export_state(trainer.state, predict, data, options, out)


def evaluation_data(state: State) -> Iterable[Any]:
    """Return the data of the first evaluation set. Raises WrongValue if there is none."""
    if not state.eval_sets:
        raise WrongValue(
            "An export is verified on real samples, and this run has no evaluation set. Pass «data=loader to export, or eval_data= "
            "to the Trainer¦Write `eval_data: {test: module:loader}`»."
        )
    data: Iterable[Any] = next(iter(state.eval_sets.values())).data
    return data


def export_state(
    state: State, predict: Predict, data: Iterable[Any], options: Options, out: str | Path | None = None
) -> Exported:
    """Implement `export` for a state, also during a fit."""
    format = format_of(options.to)
    folder = checked(state.folder.path / "exports" / options.to if out is None else out)
    subject, verified, facts = prepare(state, predict, data, options, format)
    options.say(f"converting to {options.to}")
    built = format.build(subject)
    if out is None:
        state.folder.claim()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}")
    temporary.mkdir()
    try:
        options.say("writing")
        with torch.no_grad():
            format.write(built, subject, temporary)
        options.say("running what was written")
        try:
            comparisons = compare(format.load(subject, temporary), verified, subject.axes)
        except ExportDiffers as error:
            raise ExportDiffers(f"{error} Nothing was left in {folder}.") from error
        description = describe(state, subject, verified, options, facts)
        _write(temporary / MANIFEST, description)
        _write(temporary / VERIFICATION, _verification(comparisons, options, facts))
        _replace(folder, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(folder, description, comparisons)


def checked(folder: str | Path) -> Path:
    """Return a folder as an absolute path. Raises ExistingFile if something else is there than an earlier export."""
    path = Path(folder).expanduser().absolute()
    if os.path.lexists(path) and not (path.is_dir() and (not any(path.iterdir()) or (path / MANIFEST).is_file())):
        raise ExistingFile(
            f"{path} is there, and is not an earlier export, which would be replaced. Give another folder, or remove it."
        )
    return path


@dataclass(frozen=True)
class Facts:
    """What is said of an export besides its tensors."""

    origin: Mapping[str, Any]
    preprocessing: Sequence[Mapping[str, str]]
    classes: Sequence[str] | None
    #: The outputs of predictions that are not exported, and the inputs that have no effect.
    left_out: Sequence[str]
    unused: Sequence[str]
    #: What the files are compared with, and how much predictions in another precision differ from that.
    reference: str
    rounding: float | None


def prepare(
    state: State, predict: Predict, data: Iterable[Any], options: Options, format: Format
) -> tuple[Subject, list[Sample], Facts]:
    """Return what to export, and the samples to verify it with. Nothing is written.

    Raises:
        hocket.errors.Unsupported: it cannot be exported.
        hocket.errors.MissingPackage: a library is missing.
    """
    adapters_of.check_choice(options.adapters)
    subject = Subject(None, {}, {}, None, [each.name for each in state.replacements], None, options.adapters == "apart")  # type: ignore[arg-type]
    options.say("predicting")
    batches, counts = samples.batches_of(state.task, data)
    with observed(state, predict) as (observer, predicted):
        outputs = predicted(batches)
        if len(outputs) != len(batches):
            raise WrongValue(
                f"«limit_predict=» left {len(outputs)} of {len(batches)} predictions. Export with a Trainer without it."
            )
        model = observer.model()
        subject.model, subject.tokenizer = model, getattr(state.task, "tokenizer", None)
        format.check(subject)
        is_precise = _is_precise(state, model)
        if not is_precise and format.graph:
            options.say(f"{type(state.precision).__name__} is not exported: the model computes in float32")
            model.network.float()
        inputs = [_float(observer.inputs(number), format.graph and not is_precise) for number in range(len(batches))]
        axes = varying(inputs[0], inputs[1:], counts)
        chosen = _that_work(model, inputs[0], lengths(inputs[0], options.dynamic, axes), options)
        if chosen:
            outputs += predicted([samples.shortened(batches[0], inputs[0], chosen)])
            inputs.append(_float(observer.inputs(len(batches)), format.graph and not is_precise))
            counts.append(counts[0])
    for (name, axis), label in chosen.items():
        before, after = inputs[0][name].shape[axis], inputs[-1][name].shape[axis]
        if before != after:
            axes.setdefault(name, {})[axis] = label
    reference = [named_tensors(output, "output") for output in outputs]
    rounding = None
    if not is_precise:
        precise = [model.outputs(each) for each in inputs]
        rounding = max(
            difference(mine[name], theirs[name])
            for mine, theirs in zip(precise, reference, strict=True)
            for name in mine
        )
        reference = precise
    _handle_adapters(subject)
    subject.inputs, subject.axes = inputs[0], axes
    unused: list[str] = []
    if format.graph:
        options.say("tracing")
        unused = _trace(subject, options)
        inputs = [{name: each[name] for name in subject.inputs} for each in inputs]
    names = subject.model.outputs(inputs[0]).keys()
    left_out = [name for name in named_tensors(outputs[0], "output") if name not in names]
    is_longer = any(label != "batch" for varying_axes in subject.axes.values() for label in varying_axes.values())
    verified = [
        Sample(counts[number], inputs[number], reference[number])
        for number in range(len(inputs))
        if number and (number < len(batches) or is_longer)
    ]
    facts = Facts(
        manifest.origin(state, options.checkpoint, subject.model.network), manifest.preprocessing(state, data, _inside(observer)),
        manifest.classes(state, data), left_out, unused,
        "trainer.predict" if is_precise else "the model in float32" if format.graph else "the model on the CPU", rounding,
    )  # fmt: skip
    return subject, verified, facts


def _that_work(
    model: PortableModel, inputs: Mapping[str, Tensor], chosen: Mapping[tuple[str, int], str], options: Options
) -> dict[tuple[str, int], str]:
    """Return the axes if the model computes with half of them. Raises Unsupported for axes that users named."""
    if not chosen:
        return {}
    try:
        model.outputs(halved(inputs, chosen))
    except Exception as error:
        asked = [name for (name, _), label in chosen.items() if label != "length"]
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if asked:
            raise Unsupported(
                f"The model does not compute with half of the axes that «dynamic={dict(options.dynamic)!r}» names: {reason} "
                "Remove them. Nothing was written."
            ) from error
        options.say(f"the length of {next(iter(chosen))[0]} is fixed, because the model fails with half of it: {reason}")
        return {}
    return dict(chosen)


def _handle_adapters(subject: Subject) -> None:
    """Merge the adapters unless they are kept apart. Raises WrongValue if there are none to keep."""
    network = subject.model.network
    if subject.apart and not adapters_of.has_adapters(network):
        raise WrongValue(f"«adapters='apart'» needs adapters, and {type(network).__name__} has none. Omit it.")
    if not subject.apart:
        with torch.no_grad():
            subject.model.network = adapters_of.merge(network)


def _trace(subject: Subject, options: Options) -> list[str]:
    """Make the graph, without inputs that have no effect, and return the names of those."""
    model, inputs, asked = subject.model, subject.inputs, subject.axes
    subject.program, subject.axes = graphs.traced(model, inputs, asked)
    unused = graphs.unused_inputs(subject.program)
    if unused and len(unused) < len(inputs):
        fewer = model.without({name: inputs[name] for name in unused})
        kept = {name: each for name, each in inputs.items() if name not in unused}
        kept_axes = {name: each for name, each in asked.items() if name in kept}
        subject.program, subject.axes = graphs.traced(fewer, kept, kept_axes)
        subject.model, subject.inputs, asked = fewer, kept, kept_axes
    else:
        unused = []
    for name, axes in asked.items():
        for axis, label in axes.items():
            if axis not in subject.axes.get(name, {}):
                if axis in options.dynamic.get(name, ()):
                    raise Unsupported(f"Axis {axis} of '{name}' is fixed by the model's code. Remove it from dynamic=.")
                options.say(f"axis {axis} of '{name}' ({label}) is fixed at {inputs[name].shape[axis]} by the model's code")
    return unused


def _is_precise(state: State, model: nn.Module) -> bool:
    """Whether predictions are computed in float32 or float64."""
    wide = (torch.float32, torch.float64)
    tensors = [each for each in model.state_dict().values() if isinstance(each, Tensor) and each.is_floating_point()]
    precision = state.precision
    return (
        precision.compute_dtype in wide
        and getattr(precision, "input_dtype", None) in (None, *wide)
        and all(each.dtype in wide for each in tensors)
    )


def _float(inputs: Mapping[str, Tensor], convert: bool) -> dict[str, Tensor]:
    return {name: each.float() if convert and each.is_floating_point() else each for name, each in inputs.items()}


def _inside(observer: Observer) -> list[str]:
    """Return the arguments of the Trainer that the exported model applies itself."""
    return ["inputs", "outputs"] if observer.method == "eval_forward" else ["outputs"] if observer.part is not None else []


def describe(
    state: State, subject: Subject, verified: Sequence[Sample], options: Options, facts: Facts
) -> dict[str, Any]:
    """Return the content of ``export.json``."""
    outputs = [subject.model.outputs(sample.inputs) for sample in verified]
    output_axes = manifest.output_axes(outputs, [sample.sizes(subject.axes) for sample in verified])
    return {
        "format": options.to,
        "model": type(subject.model.network).__name__,
        "inputs": manifest.tensors_as_json(subject.inputs, subject.axes),
        "outputs": manifest.tensors_as_json(outputs[0], output_axes),
        "left_out": {"inputs": list(facts.unused), "outputs": list(facts.left_out)},
        "classes": facts.classes,
        "preprocessing": list(facts.preprocessing),
        "adapters": options.adapters if subject.apart else "merged",
        "origin": dict(facts.origin),
        "versions": manifest.versions(),
    }


def _verification(comparisons: Sequence[Comparison], options: Options, facts: Facts) -> dict[str, Any]:
    return {
        "format": options.to,
        "compared_with": facts.reference,
        "tolerance": TOLERANCE,
        "difference": max(comparison.difference for comparison in comparisons),
        "difference_of_precision": facts.rounding,
        "batches": [comparison.as_dict() for comparison in comparisons],
    }


def _write(file: Path, content: Mapping[str, Any]) -> None:
    safe_files.replace(file, json.dumps(strict(content), indent=1) + "\n")


def _replace(folder: Path, temporary: Path) -> None:
    """Put the new folder in place of an earlier one."""
    if not folder.exists():
        temporary.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}")
    folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old)
