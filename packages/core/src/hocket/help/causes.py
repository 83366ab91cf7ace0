"""Causes of exceptions in a model and its loss, found by torch's message and the tensors, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.data import nesting
from hocket.help import names
from hocket.help.failure import Failure
from hocket.losses import own_loss
from hocket.task import SupervisedTask, Task

#: Tells a cause and its remedy, or returns empty where they do not apply.
Cause = Callable[[Failure], str]

# --- causes: each returns one or two sentences, or empty where it does not apply


def _whole_batch(failure: Failure) -> str:
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


def _swapped(failure: Failure, fits: Callable[[Tensor], bool]) -> str:
    """Return what to write if the batch seems to be (targets, inputs): the targets would fit the model and are larger."""
    task, inputs, targets = failure.task, failure.inputs, failure.targets
    if not isinstance(task, SupervisedTask) or not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        return ""
    first = 0 if task.inputs is None else task.inputs
    second = 1 if task.targets is None else task.targets
    if callable(first) or callable(second) or targets.numel() <= inputs.numel() or not fits(targets):
        return ""
    return (
        f"The model was given {_said(inputs)}, and the targets are {_said(targets)}, so they seem to be swapped. Write "
        f"inputs={second!r}, targets={first!r} in the Trainer."
    )


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _width(failure: Failure) -> str:
    sizes = re.search(r"\((\d+)x(\d+) and (\d+)x(\d+)\)", failure.text)
    if sizes is None:
        return ""
    given, taken = int(sizes[2]), int(sizes[3])
    inputs = failure.inputs
    if swapped := _swapped(failure, lambda targets: targets.dim() > 1 and targets.shape[-1] == taken):
        return swapped
    flat = isinstance(inputs, Tensor) and inputs.dim() > 2 and inputs[0].numel() == taken
    if flat:
        return (
            f"A Linear layer takes {taken} features, which each sample has in several dimensions: begin with "
            "torch.nn.Flatten()."
        )
    return (
        f"A Linear layer takes {taken} features in the last dimension and was given {given}. Write "
        f"torch.nn.Linear({given}, …), or give inputs with {taken} features."
    )


def _dtype(failure: Failure) -> str:
    inputs = failure.inputs
    if not isinstance(inputs, Tensor):
        return _not_tensor(failure)
    parameter = next(iter(failure.network.parameters()), None)
    if parameter is None or parameter.dtype == inputs.dtype:
        return ""
    if not inputs.is_floating_point() and (
        swapped := _swapped(failure, lambda targets: targets.dtype == parameter.dtype)
    ):
        return swapped
    wanted = str(parameter.dtype).removeprefix("torch.")
    convert = "inputs.float() / 255" if inputs.dtype is torch.uint8 else f"inputs.to({parameter.dtype})"
    return (
        f"The inputs are {str(inputs.dtype).removeprefix('torch.')} and the model's weights {wanted}. Give {wanted}: write "
        f"{convert} in the data set or the collate_fn."
    )


def _channels(failure: Failure) -> str:
    found = re.search(r"weight of size \[(\d+), (\d+).*expected input\[(.*?)\] to have (\d+) channels", failure.text)
    if found is None:
        return ""
    sizes, wanted = [int(size) for size in found[3].split(",")], int(found[4])
    inputs, kind = failure.inputs, f"Conv{len(sizes) - 2}d"
    what = "images" if len(sizes) == 4 else "inputs"
    spatial = {3: "length", 4: "height, width"}.get(len(sizes), "depth, height, width")
    if isinstance(inputs, Tensor) and [1, *inputs.shape] == sizes:  # torch took the samples for channels
        layer = "" if wanted == 1 else f", and torch.nn.{kind}(1, …) for one channel"
        return (
            f"A {kind} takes {what} of shape (samples, channels, {spatial}), and these have no dimension of channels. Write "
            f"{what}.unsqueeze(1) in the data set or the model{layer}."
        )
    if sizes[-1] == wanted:
        move = "transpose(1, 2)" if len(sizes) == 3 else f"permute{(0, len(sizes) - 1, *range(1, len(sizes) - 1))}"
        return (
            f"A {kind} takes {what} of shape (samples, channels, {spatial}), and these have {wanted} channels in the last "
            f"dimension. Write {what}.{move} in the data set or the model."
        )
    return (
        f"The layer takes {wanted} channels and was given {sizes[1]}. Write torch.nn.{kind}({sizes[1]}, …), or convert "
        "the inputs."
    )


def _detection(failure: Failure) -> str:
    if not isinstance(failure.task, SupervisedTask):
        return ""
    return (
        "In training a model of detection takes images and targets and returns its losses. Write a hocket.Task whose "
        "forward(self, batch) returns self.network(*batch), whose loss(self, outputs, batch) returns outputs, and whose "
        "eval_forward(self, batch) returns self.network(batch[0]); docs/your-model.md has it in full."
    )


def _dimensions(failure: Failure) -> str:
    return (
        "A convolution takes images of shape (samples, channels, height, width). Write images.unsqueeze(1) for images "
        "without a dimension of channels, or images.reshape(-1, 1, height, width)."
    )


def _arguments(failure: Failure) -> str:
    batch = failure.batch
    if isinstance(failure.task, SupervisedTask):
        if isinstance(batch, Mapping) and failure.task.inputs is None:
            keys = [str(key) for key in batch]
            nested = [isinstance(part, list | tuple | Mapping) for part in batch.values()]
            if nested == [True]:
                return (
                    f"The batch is a dict from {keys[0]!r} to a batch. If it is of hocket.data.Several, write Several(…, "
                    "named=False), which yields the batch itself."
                )
            return (
                f"From a dict the model gets all of {', '.join(map(repr, keys))} by name, and its forward should accept those "
                f"names. Write Trainer(inputs={_key(batch, 'inputs', failure.task)!r}, "
                f"targets={_key(batch, 'targets', failure.task)!r}) to give it one of them."
            )
        return (
            "The model gets batch[0] alone. For a model with several inputs, yield dicts whose keys are the names of the "
            "arguments of forward, with targets='label' in the Trainer; or write a hocket.Task with forward(self, batch)."
        )
    return "The forward of a hocket.Task gets the whole batch: def forward(self, batch), and loss gets (self, outputs, batch)."


def _part(failure: Failure) -> str:
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
        return f"Write {wrong}={_key(batch, wrong, task)!r}."
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


def _key(batch: Mapping[Any, Any], argument: str, task: SupervisedTask) -> Any:
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


def _not_tensor(failure: Failure) -> str:
    inputs = failure.inputs
    if isinstance(inputs, Tensor):
        return ""
    if type(inputs).__module__ == "numpy":
        return (
            "The model was given a NumPy array. Write torch.from_numpy(inputs).float(), or a DataLoader, which makes "
            "tensors."
        )
    what = (
        "text" if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], str) else type(inputs).__name__
    )
    return (
        f"The model was given {what}, and its layers take tensors. Convert samples in the data set or in collate_fn= of the "
        "DataLoader, such as torch.tensor(token_ids)."
    )


def _outputs(failure: Failure) -> str:
    """Return what is wrong with outputs that no loss can use, whatever it raised."""
    outputs, task = failure.outputs, failure.task
    if isinstance(task, SupervisedTask) and task.loss_function is not None:
        own = "The model returned its own loss"
        if isinstance(own_loss(outputs), Tensor):
            return f"{own}, which is in its outputs as 'loss'. Omit loss= in the Trainer."
        first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
        if isinstance(first, Tensor) and not first.dim() and first.is_floating_point():
            return f"{own}, a scalar. Return {{'loss': loss, 'logits': logits}} from forward, and omit loss= in the Trainer."
    if outputs is None:
        return "The model returned None, and the loss takes a tensor. Write a return statement at the end of forward."
    if isinstance(outputs, int | float) or type(outputs).__module__ == "numpy":
        return (
            f"The model returned {type(outputs).__name__} of {type(outputs).__module__}, which has no gradient. Return the "
            "tensor: remove .detach(), .numpy(), .item() and .tolist() from forward."
        )
    if isinstance(outputs, Tensor) and not outputs.is_floating_point() and not outputs.is_complex():
        return (
            f"The outputs are {_said(outputs)}, which has no gradient, and the loss takes the scores that they were computed "
            "from. Remove argmax, round, long() or a comparison from the end of forward."
        )
    return ""


def _tuple(failure: Failure) -> str:
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
            f"targets={_key(failure.batch, 'targets', failure.task)!r}) to give it one of "
            f"{', '.join(map(repr, keys))}."
        )
    if failure.where == "loss" and "targets" in failure.parts() and not isinstance(failure.targets, Tensor | Mapping):
        return (
            "The loss takes targets as a tensor. Write torch.tensor(labels) in the data set or the collate_fn of the "
            "DataLoader."
        )
    return ""


_ORDER = (
    "A loss is called with (outputs, targets), in this order. Write loss=lambda outputs, targets: …, or def loss(outputs, "
    "targets)."
)


def _order(failure: Failure) -> str:
    outputs = failure.outputs
    swapped = (
        isinstance(outputs, Tensor)
        and outputs.is_floating_point()
        and failure.function in ("cross_entropy", "nll_loss")
    )
    return _ORDER if swapped else ""


def _loss_arguments(failure: Failure) -> str:
    if isinstance(failure.task, SupervisedTask):
        return _ORDER
    return "The loss of a hocket.Task gets (self, outputs, batch): write def loss(self, outputs, batch)."


def _class_labels(failure: Failure) -> str:
    outputs, targets = failure.outputs, failure.targets
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ""
    if failure.function not in ("cross_entropy", "nll_loss", ""):
        return ""
    if outputs.dim() > 2 and targets.shape == outputs.shape[:-1]:
        return "cross_entropy takes outputs of shape (samples, classes, length). Write outputs.transpose(1, 2) before the loss."
    classes = outputs.shape[1] if outputs.dim() > 1 else 0
    indices = f"class indices, int64 of shape ({outputs.shape[0]},), from 0 to {classes - 1}"
    wanted = f"Labels of cross_entropy and nll_loss are {indices}"
    if targets.dim() == 2 and targets.shape[1] == 1:
        return f"{wanted}. Write targets.squeeze(1)" + ("." if not targets.is_floating_point() else ".long().")
    if targets.shape == outputs.shape:
        return f"{wanted}, or probabilities in floating point. Write targets.argmax(1) for one-hot labels, or targets.float()."
    if targets.is_floating_point() or targets.dtype is not torch.int64:
        return (
            f"{wanted}. Write targets.long() in the data set; for regression write loss=torch.nn.functional.mse_loss."
        )
    return f"{wanted}."


def _same_part(failure: Failure) -> str:
    """Return what to write if ``targets=`` chooses the inputs, though the batch has something else."""
    task, batch = failure.task, failure.batch
    if not isinstance(task, SupervisedTask) or task.targets is None or failure.targets is not failure.inputs:
        return ""
    if callable(task.targets) or len(batch) < 2:
        return ""
    if isinstance(batch, Mapping):
        write = repr(next((key for key in reversed(list(batch)) if batch[key] is not failure.inputs), ""))
    else:
        write = "1" if batch[1] is not failure.inputs else "0"
    return f"targets={task.targets!r} is what the model gets as its inputs. Write targets={write}."


def _divergence(failure: Failure) -> str:
    targets = failure.targets
    if failure.function != "kl_div" or not isinstance(targets, Tensor) or targets.is_floating_point():
        return ""
    return (
        f"kl_div takes log-probabilities, and targets of probabilities in the same shape; these targets are {_said(targets)}. "
        "For class labels write loss=torch.nn.functional.cross_entropy."
    )


def _no_batch(failure: Failure) -> str:
    if failure.batch is not None:
        return ""
    return "The data yielded None in place of a batch. Write a return statement at the end of collate_fn, or of __getitem__."


def _out_of_range(failure: Failure) -> str:
    outputs, targets = failure.outputs, failure.targets
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.dim() < 2:
        return ""
    classes, low, high = outputs.shape[1], int(targets.min()), int(targets.max())
    if low < 0 or (low == 1 and high == classes):
        shift = f"targets {'+' if low < 0 else '-'} {abs(low)}"
        write = f"Write {shift} in the data set{', or ignore_index=' + str(low) if low < 0 else ''}."
        return f"The model has {classes} outputs, so labels are 0 to {classes - 1}; these are {low} to {high}. {write}"
    return (
        f"The model has {classes} outputs, so labels are 0 to {classes - 1}; these are {low} to {high}. For {high + 1} "
        f"classes, end the model with torch.nn.Linear(…, {high + 1})."
    )


def _tokens(failure: Failure) -> str:
    table = next((module for module in failure.network.modules() if isinstance(module, nn.Embedding)), None)
    values = [each for each in _tensors(failure.batch) if not each.is_floating_point() and each.numel()]
    if table is None or not values:
        return ""
    high = max(int(each.max()) for each in values)
    larger = (
        f"Write torch.nn.Embedding({high + 1}, …), or check the tokenizer."
        if high >= table.num_embeddings
        else "Write inputs.clamp(min=0), or another padding index, in the data set."
    )
    return (
        f"An Embedding of {table.num_embeddings} entries takes indices from 0 to {table.num_embeddings - 1}, and the batch has "
        f"{min(int(each.min()) for each in values)} to {high}. {larger}"
    )


def _indices(failure: Failure) -> str:
    if swapped := _swapped(failure, lambda targets: targets.dtype is torch.int64):
        return swapped
    return "An Embedding takes indices, integers of dtype int64. Write inputs.long() in the data set."


def _reshape(failure: Failure) -> str:
    return "A reshape or view in the model has sizes that this batch does not. Write x.reshape(len(x), -1), or x.flatten(1)."


def _class_weights(failure: Failure) -> str:
    outputs = failure.outputs
    classes = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.dim() > 1 else 1
    return (
        f"The class weights of the loss need one entry for each of the {classes} classes: weight=torch.ones({classes})."
    )


def _probabilities(failure: Failure) -> str:
    return (
        "binary_cross_entropy takes probabilities from 0 to 1. Write "
        "loss=torch.nn.functional.binary_cross_entropy_with_logits, or end the model with torch.nn.Sigmoid(); labels are "
        "0.0 to 1.0 too."
    )


def _sizes(failure: Failure) -> str:
    outputs, targets = failure.outputs, failure.targets
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ""
    shapes = f"{tuple(outputs.shape)} and the targets {tuple(targets.shape)}"
    given = f"The outputs have the shape {shapes}; this loss takes equal shapes."
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
        return f"{given} Write outputs.squeeze(1) at the end of the model, or targets.unsqueeze(1) in the data."
    if outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
        return f"{given} For class labels write loss=torch.nn.functional.cross_entropy."
    return f"{given} Write targets.reshape(outputs.shape) if they hold the same numbers, or change the last layer of the model."


def _float_targets(failure: Failure) -> str:
    outputs, targets = failure.outputs, failure.targets
    if not isinstance(targets, Tensor) or not isinstance(outputs, Tensor) or targets.dtype == outputs.dtype:
        return ""
    return (
        f"The targets are {str(targets.dtype).removeprefix('torch.')} and the outputs "
        f"{str(outputs.dtype).removeprefix('torch.')}; this loss takes one dtype. Write targets.float() in the data set; "
        "for class labels write loss=torch.nn.functional.cross_entropy."
    )


def _no_targets(failure: Failure) -> str:
    batch, task = failure.batch, failure.task
    lone = isinstance(batch, Tensor) or (isinstance(batch, tuple | list) and len(batch) < 2)
    if not lone or (isinstance(task, SupervisedTask) and task.targets is not None):
        return ""
    return (
        f"The loss takes targets, and the batch, a {type(batch).__name__}, has none. Give batches (inputs, targets), or "
        "targets= a name or function; without labels use trainer.predict(data), or a hocket.Task whose loss needs none."
    )


def _batch_norm(failure: Failure) -> str:
    return (
        "BatchNorm needs more than one sample in train mode. Write DataLoader(…, drop_last=True), or a batch_size of "
        "2 or more."
    )


def _memory(failure: Failure) -> str:
    return (
        "Write microbatch='auto' in the Trainer, which finds the number of samples that fits; gradients stay the same."
    )


def _devices(failure: Failure) -> str:
    return (
        "Parameters and buffers of the model, and tensors of the batch, are moved to the device; tensors made elsewhere "
        "are not. Write torch.zeros(…, device=inputs.device), or self.register_buffer('name', tensor)."
    )


def _attribute(failure: Failure) -> str:
    name = getattr(failure.error, "name", None) or failure.text.rpartition("attribute ")[2].strip("'\"")
    obj = getattr(failure.error, "obj", None)
    if obj is not None and not isinstance(obj, nn.Module):
        return _not_tensor(failure) or _tuple(failure)
    if text := names.listed(str(name), "task"):
        return f"{name!r} belongs to Lightning. Write {text}."
    return f"Define self.{name} in __init__, after super().__init__()."


def _backward_twice(failure: Failure) -> str:
    return (
        "Either a tensor of an earlier batch or step is used again with its graph, such as a hidden state kept on self: write "
        "self.hidden = hidden.detach(), or pass it as carry= and return it as kept=. Or the loss function called backward "
        "itself: return the loss only."
    )


def _in_place(failure: Failure) -> str:
    return "Write x = x + y instead of x += y in the model, and Trainer(detect_anomaly=True) to find the operation."


def _forward_missing(failure: Failure) -> str:
    kind = type(failure.network).__name__
    return f"Define def forward(self, {'batch' if isinstance(failure.network, Task) else 'inputs'}) in {kind}."


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    nesting.map_tensors(found.append, value)
    return found


_SIGNATURE = r"missing \d+ required|takes .*positional|unexpected keyword"
#: Causes by the place of the exception and a pattern of torch's message; the first that applies is told.
CAUSES: Mapping[str, Sequence[tuple[str, Cause]]] = {
    "forward": (
        (r"", _whole_batch),
        (r"mat1 and mat2 shapes cannot be multiplied|size mismatch, got input", _width),
        (r"same dtype|should be the same|expected scalar type|not implemented for '", _dtype),
        (r"to have \d+ channels", _channels),
        (r"[Ee]xpected \dD .*input", _dimensions),
        (_SIGNATURE, _arguments),
        (r"targets should not be none", _detection),
        (r"index out of range in self", _tokens),
        (r"must be Tensor, not|must be tensors", _not_tensor),
        (r"more than 1 value per channel", _batch_norm),
        (r"has nothing at", _part),
        (r"argument #1 'indices'", _indices),
        (r"is invalid for", _reshape),
        (r"missing the required \"forward\"|needs a forward", _forward_missing),
        (r"has no attribute", _attribute),
    ),
    "loss": (
        (r"", _whole_batch),
        (r"has nothing at", _part),
        (r"", _outputs),
        (r"", _no_targets),
        (r"", _same_part),
        (r"", _divergence),
        (_SIGNATURE, _loss_arguments),
        (r"must be Tensor, not|has no attribute|subscriptable|unsupported operand", _tuple),
        (r"has no attribute", _attribute),
        (r"Target -?\d+ is out of bounds|device-side assert", _out_of_range),
        (r"not implemented for '(Long|Int)'", _order),
        (r"multi-target|type Long|dtype to be Long|class probabilities|0D or 1D target|target tensor", _class_labels),
        (r"between 0 and 1", _probabilities),
        (r"weight tensor should be", _class_weights),
        (r"[Tt]arget size|must match the size|shape mismatch|same size", _class_labels),
        (r"[Tt]arget size|must match the size|shape mismatch|same size|batch_size", _sizes),
        (r"result type|Found dtype|same dtype|expected scalar type|not implemented for '", _float_targets),
    ),
    "backward": (
        (r"Found dtype|result type|same dtype", _float_targets),
        (r"second time", _backward_twice),
        (r"inplace operation", _in_place),
    ),
}
ANYWHERE: Sequence[tuple[str, Cause]] = (
    (r"", _no_batch),
    (r"out of memory", _memory),
    (r"same device|[Oo]n (the )?expected device|on device", _devices),
)
