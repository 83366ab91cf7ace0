"""Causes that several places have in common, and helpers of their modules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hocket.help import names
from hocket.state.task import SupervisedTask
from hocket_insight.failures.failure import Failure

#: Tells a cause and its remedy in one or two sentences, or returns empty where they do not apply.
Cause = Callable[[Failure], str]
#: Messages of Python for a function that was called with other arguments.
SIGNATURE = r"missing \d+ required|takes .*positional|unexpected keyword"


def said(tensor: Tensor) -> str:
    """Return dtype and shape in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def whole_batch(failure: Failure) -> str:
    """Return what to write if a Task used the whole batch as a tensor."""
    batch, task = failure.batch, failure.task
    if isinstance(task, SupervisedTask) or not isinstance(batch, list | tuple | Mapping) or not batch:
        return ""
    kind = type(batch).__name__
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    among = any(type(part) is type(batch) for part in [*parts, failure.outputs])
    if among or not re.search(rf"\b{kind}\b", failure.text):  # the batch itself was used as a tensor
        return ""
    pair = not isinstance(batch, Mapping) and len(batch) == 2
    first = next(iter(batch)) if isinstance(batch, Mapping) else 0
    write = "inputs, targets = batch" if pair else f"inputs = batch[{first!r}]"
    return f"forward and loss of a Task get the whole batch, a {kind} of {len(batch)}: write {write}."


def missing_part(failure: Failure) -> str:
    """Return what to write for ``inputs=``, ``targets=`` or ``outputs=`` that names nothing in the batch or the outputs."""
    found = re.search(r"nothing at (.*); it has", failure.text)
    task = failure.task
    if found is None or not isinstance(task, SupervisedTask):
        return ""
    if "The model's output," in failure.text:
        kind = re.search(r"The model's output, an? (\w+)", failure.text)
        keys = re.findall(r"'(\w+)'", failure.text.partition("it has")[2])
        if keys:
            return f"Write outputs={_nearest(str(task.outputs), keys)!r}."
        if "items." in failure.text:
            return "Write outputs=0 for the first of them."
        return f"The model returns one {kind[1] if kind else 'object'}: omit outputs=."
    batch = failure.batch
    if isinstance(batch, Mapping):
        wrong = next((name for name in ("inputs", "targets") if repr(getattr(task, name)) == found[1]), "inputs")
        return f"Write {wrong}={probable_key(batch, wrong, task)!r}."
    if isinstance(batch, list | tuple):
        places = {"inputs": 0, "targets": min(1, len(batch) - 1)}
        wrong = ", ".join(
            f"{name}={place}"
            for name, place in places.items()
            if isinstance(given := getattr(task, name), str) or (isinstance(given, int) and given >= len(batch))
        )
        return (
            f"A {type(batch).__name__} has indices from 0 to {len(batch) - 1}. Write {wrong or 'inputs=0, targets=1'}."
        )
    return f"The batch is one {type(batch).__name__}: omit inputs=."


def probable_key(batch: Mapping[Any, Any], argument: str, task: SupervisedTask) -> Any:
    """Return the key of a batch that ``inputs=`` or ``targets=`` probably means: a similar one, or a usual one, or another."""
    given, other = (task.inputs, task.targets) if argument == "inputs" else (task.targets, task.inputs)
    keys = [key for key in batch if key != other or len(batch) == 1]
    if given is not None and not callable(given) and given not in batch:
        near = _nearest(str(given), list(map(str, keys)), "")
        if near:
            return next(key for key in keys if str(key) == near)
    tensors = [key for key in keys if isinstance(batch[key], Tensor)] or keys
    labels = [key for key in tensors if str(key).lower() in _LABELS]
    if argument == "targets":
        return (labels or [key for key in reversed(tensors)])[0]
    return ([key for key in tensors if key not in labels] or tensors)[0]


_LABELS = ("label", "labels", "target", "targets", "y")


def _nearest(name: str, names: Sequence[str], otherwise: str | None = None) -> str:
    return next(iter(difflib.get_close_matches(name, names, 1)), names[0] if otherwise is None else otherwise)


def not_tensor(failure: Failure) -> str:
    """Return what to write if the inputs are not a tensor."""
    inputs = failure.inputs
    if isinstance(inputs, Tensor):
        return ""
    if type(inputs).__module__ == "numpy":
        return (
            "The model got a NumPy array. Write torch.from_numpy(inputs).float(), or a DataLoader, which makes tensors."
        )
    what = (
        "text" if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], str) else type(inputs).__name__
    )
    return (
        f"The model was given {what}, and its layers take tensors. Convert samples in the data set or in collate_fn= of the "
        "DataLoader, such as torch.tensor(token_ids)."
    )


def not_one_tensor(failure: Failure) -> str:
    """Return what to write if outputs or targets are not one tensor, as losses take it."""
    if isinstance(failure.outputs, tuple | list):
        if failure.outputs and all(isinstance(each, int | float | list) for each in failure.outputs):
            return "The model returned a list of numbers, without a gradient. Return the tensor: remove .tolist() from forward."
        return (
            f"The model returned {len(failure.outputs)} values, and the loss takes one tensor. Write loss=lambda outputs, "
            "targets: cross_entropy(outputs[0], targets), or return one tensor from forward."
        )
    if isinstance(failure.outputs, Mapping):
        key = next(iter(failure.outputs), "logits")
        return (
            f"The model returned a dict. Write loss=lambda outputs, targets: cross_entropy(outputs[{key!r}], targets)."
        )
    if isinstance(failure.batch, Mapping) and isinstance(failure.task, SupervisedTask) and failure.task.targets is None:
        keys = [str(key) for key in failure.batch]
        return (
            "From a dict the loss gets the whole batch. Write Trainer("
            f"targets={probable_key(failure.batch, 'targets', failure.task)!r}) to give it one of "
            f"{', '.join(map(repr, keys))}."
        )
    if failure.where == "loss" and "targets" in failure.parts() and not isinstance(failure.targets, Tensor | Mapping):
        return (
            "The loss takes targets as a tensor. Write torch.tensor(labels) in the data set or the collate_fn of the "
            "DataLoader."
        )
    return ""


def missing_attribute(failure: Failure) -> str:
    """Return what to write for an attribute that a model, its inputs or its outputs do not have."""
    name = getattr(failure.error, "name", None) or failure.text.rpartition("attribute ")[2].strip("'\"")
    obj = getattr(failure.error, "obj", None)
    if obj is not None and not isinstance(obj, nn.Module):
        return not_tensor(failure) or not_one_tensor(failure)
    if text := names.listed(str(name), "task"):
        return f"{name!r} belongs to Lightning. Write {text}."
    return f"Define self.{name} in __init__, after super().__init__()."


def float_targets(failure: Failure) -> str:
    """Return what to write if outputs and targets have different dtypes."""
    outputs, targets = failure.outputs, failure.targets
    if not isinstance(targets, Tensor) or not isinstance(outputs, Tensor) or targets.dtype == outputs.dtype:
        return ""
    return (
        f"The targets are {str(targets.dtype).removeprefix('torch.')} and the outputs "
        f"{str(outputs.dtype).removeprefix('torch.')}; this loss takes one dtype. Write targets.float() in the data set; "
        "for class labels write loss=torch.nn.functional.cross_entropy."
    )


def _no_batch(failure: Failure) -> str:
    if failure.batch is not None:
        return ""
    return "The data yielded None in place of a batch. Write a return statement at the end of collate_fn, or of __getitem__."


def _memory(failure: Failure) -> str:
    return (
        "Write microbatch='auto' in the Trainer, which finds the number of samples that fits; gradients stay the same."
    )


def _devices(failure: Failure) -> str:
    return (
        "Parameters and buffers of the model, and tensors of the batch, are moved to the device; tensors made elsewhere "
        "are not. Write torch.zeros(…, device=inputs.device), or self.register_buffer('name', tensor)."
    )


#: Causes that are tried at each place, before its own.
ANYWHERE: Sequence[tuple[str, Cause]] = (
    (r"", _no_batch),
    (r"out of memory", _memory),
    (r"same device|[Oo]n (the )?expected device|on device", _devices),
)
