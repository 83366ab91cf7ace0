"""Causes of exceptions in the forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hocket.data import nesting
from hocket.state.task import SupervisedTask, Task
from hocket_insight.failures.failure import Failure
from hocket_insight.failures.shared import (
    SIGNATURE,
    Cause,
    missing_attribute,
    missing_part,
    not_tensor,
    probable_key,
    said,
    whole_batch,
)


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
        f"The model was given {said(inputs)}, and the targets are {said(targets)}, so they seem to be swapped. Write "
        f"inputs={second!r}, targets={first!r} in the Trainer."
    )


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
        return not_tensor(failure)
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


def _batch_norm_dtype(failure: Failure) -> str:
    """Return what to write for a batch norm whose weights are in 16 bits and whose running statistics are not."""
    for name, module in failure.network.named_modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase) or module.running_mean is None or not module.affine:
            continue
        weights, statistics = (str(each.dtype).removeprefix("torch.") for each in (module.weight, module.running_mean))
        if weights != statistics:
            return (
                f"The batch norm {name!r} has weights in {weights} and running statistics in {statistics}. Keep "
                "both in float32: under fsdp write strategy={'fsdp': {'param_dtype': 'fp32'}}, where activations stay in the "
                "precision's dtype, or precision='fp32'; elsewhere call .float() of the layer."
            )
    return ""


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
        "eval_forward(self, batch) returns self.network(batch[0]); docs/tutorials/your-model.md has it in full."
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
                f"names. Write Trainer(inputs={probable_key(batch, 'inputs', failure.task)!r}"
                + (f", targets={probable_key(batch, 'targets', failure.task)!r}" if keys[1:] else "")
                + ") to give it one of them."
            )
        return (
            "The model gets batch[0] alone. For a model with several inputs, yield dicts whose keys are the names of the "
            "arguments of forward, with targets='label' in the Trainer; or write a hocket.Task with forward(self, batch)."
        )
    kind = type(failure.task).__name__
    if f"{kind}.forward()" not in failure.text and f"{kind}.loss()" not in failure.text:
        return ""  # of a function that the task calls
    return "The forward of a hocket.Task gets the whole batch: def forward(self, batch), and loss gets (self, outputs, batch)."


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


def _batch_norm(failure: Failure) -> str:
    return (
        "BatchNorm needs more than one sample in train mode. Write DataLoader(…, drop_last=True), or a batch_size of "
        "2 or more."
    )


def _forward_missing(failure: Failure) -> str:
    kind = type(failure.network).__name__
    return f"Define def forward(self, {'batch' if isinstance(failure.network, Task) else 'inputs'}) in {kind}."


def _tensors(value: object) -> list[Tensor]:
    found: list[Tensor] = []
    nesting.map_tensors(found.append, value)
    return found


#: Causes, each with a pattern of torch's message; the first that applies is reported.
CAUSES: Sequence[tuple[str, Cause]] = (
    (r"", whole_batch),
    (r"mat1 and mat2 shapes cannot be multiplied|size mismatch, got input", _width),
    (r"expected scalar type|mixed dtype", _batch_norm_dtype),
    (r"same dtype|should be the same|expected scalar type|not implemented for '", _dtype),
    (r"to have \d+ channels", _channels),
    (r"[Ee]xpected \dD .*input", _dimensions),
    (SIGNATURE, _arguments),
    (r"targets should not be none", _detection),
    (r"index out of range in self", _tokens),
    (r"must be Tensor, not|must be tensors", not_tensor),
    (r"more than 1 value per channel", _batch_norm),
    (r"has nothing at", missing_part),
    (r"argument #1 'indices'", _indices),
    (r"is invalid for", _reshape),
    (r"missing the required \"forward\"|needs a forward", _forward_missing),
    (r"has no attribute", missing_attribute),
)
