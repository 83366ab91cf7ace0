"""Prepare an export: predict real samples, copy the model, handle its adapters, and trace it. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import Unsupported, WrongValue
from hocket.state.state import State
from hocket_tools.arguments import check_weights
from hocket_tools.beside import explained
from hocket_tools.exporting import adapters as adapters_of, graphs, manifest, samples
from hocket_tools.exporting.axes import Dynamic, halved, lengths, varying
from hocket_tools.exporting.formats import FORMATS, Format, Subject
from hocket_tools.exporting.named_tensors import named_tensors
from hocket_tools.exporting.observing import Observer, Predict, observed
from hocket_tools.exporting.portable import PortableModel
from hocket_tools.exporting.verification import Sample, check_finite, difference
from hocket_tools.progress import say


@dataclass(frozen=True)
class Options:
    """What to export, and how; the arguments of `export`."""

    to: str
    adapters: str = "merged"
    dynamic: Dynamic = field(default_factory=dict)
    checkpoint: str | None = None
    #: Whether an export of another run is replaced.
    overwrite: bool = False
    #: Called with the name of each stage; ``str`` does nothing.
    stage: Callable[[str], object] = str


@dataclass(frozen=True)
class Facts:
    """What is said of an export besides its tensors."""

    origin: Mapping[str, Any]
    preprocessing: Sequence[Mapping[str, str]]
    classes: Sequence[str] | None
    #: What the files are compared with, and how much predictions in another precision differ from that.
    reference: str
    rounding: float | None = None
    #: The outputs of predictions that are not exported, and the inputs that have no effect.
    left_out: Sequence[str] = ()
    unused: Sequence[str] = ()
    has_adapters: bool = False


def prepare(
    state: State, predict: Predict, options: Options, data: Iterable[Any] | None = None
) -> tuple[Format, Subject, list[Sample], Facts]:
    """Return the format, what to export, and the samples to verify it with. Nothing is written.

    Raises:
        hocket.errors.Unsupported: it cannot be exported.
        hocket.errors.MissingPackage: a library is missing.
    """
    format = FORMATS[options.to]()
    batches_in, given = samples.data_of(state, data)
    if data is None and not state.eval_sets:
        say("there is no evaluation set; the export is verified on samples of the training data.")
    replaced = [each.name for each in state.replacements if not adapters_of.has_adapters(each.new)]
    subject = Subject(None, {}, {}, None, replaced, None, options.adapters == "apart")  # type: ignore[arg-type]
    options.stage("predicting")
    batches, counts = samples.batches_of(state, batches_in, given)
    with observed(state, predict) as (observer, predicted):
        with explained("The prediction"):
            outputs = predicted(batches)
        if len(outputs) != len(batches):
            raise WrongValue(
                f"«limit_predict=» left {len(outputs)} of {len(batches)} predictions. Export with a Trainer without it."
            )
        model = observer.model()
        subject.model, subject.tokenizer = model, getattr(state.task, "tokenizer", None)
        format.check(subject)
        check_weights(model.network)
        is_precise = _is_precise(state, model)
        if not is_precise and format.graph:
            say(f"{type(state.precision).__name__} is not exported: the model computes in float32.")
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
    has_adapters = adapters_of.has_adapters(model.network)
    _handle_adapters(subject)
    subject.inputs, subject.axes = inputs[0], axes
    unused: list[str] = []
    if format.graph:
        options.stage("tracing")
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
    check_finite(verified, names & reference[0].keys())
    facts = Facts(
        origin=manifest.origin(state, options.checkpoint, subject.model.network),
        preprocessing=manifest.preprocessing(state, given, _inside(observer)), classes=manifest.classes(state, given),
        reference="trainer.predict" if is_precise else f"the model on the CPU{' in float32' if format.graph else ''}",
        left_out=left_out, unused=unused, has_adapters=has_adapters, rounding=rounding,
    )  # fmt: skip
    return format, subject, verified, facts


def _that_work(
    model: PortableModel, inputs: Mapping[str, Tensor], chosen: Mapping[tuple[str, int], str], options: Options
) -> dict[tuple[str, int], str]:
    """Return the axes if the model computes with half of them. Raises Unsupported for axes that users named."""
    if not chosen:
        return {}
    try:
        model.outputs(halved(inputs, chosen))
    except Exception as error:
        asked = [each for each, label in chosen.items() if label != "length"]
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if asked:
            raise Unsupported(
                f"The model does not compute with half of {' and '.join(f'axis {axis} of {name}' for name, axis in asked)}: "
                f"{reason.rstrip('.')}. Remove «dynamic={dict(options.dynamic)!r}¦this dynamic axis». Nothing was written."
            ) from error
        say(f"the length of {next(iter(chosen))[0]} is fixed, because the model fails with half of it: {reason}.")
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
    if len(unused) == len(inputs):
        unused = []
    if unused:
        subject.model = model.without({name: inputs[name] for name in unused})
        subject.inputs = {name: each for name, each in inputs.items() if name not in unused}
        asked = {name: each for name, each in asked.items() if name not in unused}
        subject.program, subject.axes = graphs.traced(subject.model, subject.inputs, asked)
    for name, axes in asked.items():
        for axis, label in axes.items():
            if axis not in subject.axes.get(name, {}):
                if axis in options.dynamic.get(name, ()):
                    raise Unsupported(
                        f"Axis {axis} of '{name}' is fixed by the model's code. Remove it from «dynamic=¦--dynamic»."
                    )
                say(f"axis {axis} of '{name}' ({label}) is fixed at {inputs[name].shape[axis]} by the model's code.")
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
    return (
        ["inputs", "outputs"] if observer.method == "eval_forward" else ["outputs"] if observer.part is not None else []
    )
