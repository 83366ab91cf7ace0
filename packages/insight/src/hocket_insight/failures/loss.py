"""Causes of exceptions in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hocket.basics.losses import own_loss
from hocket.state.task import SupervisedTask
from hocket_insight.failures.failure import Failure
from hocket_insight.failures.shared import (
    SIGNATURE,
    Cause,
    float_targets,
    missing_attribute,
    missing_part,
    not_one_tensor,
    said,
    whole_batch,
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
            f"The outputs are {said(outputs)}, which has no gradient, and the loss takes the scores that they were computed "
            "from. Remove argmax, round, long() or a comparison from the end of forward."
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
        f"kl_div takes log-probabilities, and targets of probabilities in the same shape; these targets are {said(targets)}. "
        "For class labels write loss=torch.nn.functional.cross_entropy."
    )


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


def _no_targets(failure: Failure) -> str:
    batch, task = failure.batch, failure.task
    lone = isinstance(batch, Tensor) or (isinstance(batch, tuple | list | Mapping) and len(batch) < 2)
    if not lone or (isinstance(task, SupervisedTask) and task.targets is not None):
        return ""
    return (
        f"The loss takes targets, and the batch, a {type(batch).__name__}, has none. Give batches (inputs, targets), or "
        "targets= a name or function; without labels use trainer.predict(data) or `hocket predict`, or a hocket.Task whose "
        "loss needs none."
    )


#: Causes, each with a pattern of torch's message; the first that applies is reported.
CAUSES: Sequence[tuple[str, Cause]] = (
    (r"", whole_batch),
    (r"has nothing at", missing_part),
    (r"", _outputs),
    (r"", _no_targets),
    (r"", _same_part),
    (r"", _divergence),
    (SIGNATURE, _loss_arguments),
    (r"must be Tensor, not|has no attribute|subscriptable|unsupported operand", not_one_tensor),
    (r"has no attribute", missing_attribute),
    (r"Target -?\d+ is out of bounds|device-side assert", _out_of_range),
    (r"not implemented for '(Long|Int)'", _order),
    (r"multi-target|type Long|dtype to be Long|class probabilities|0D or 1D target|target tensor", _class_labels),
    (r"between 0 and 1", _probabilities),
    (r"weight tensor should be", _class_weights),
    (r"[Tt]arget size|must match the size|shape mismatch|same size", _class_labels),
    (r"[Tt]arget size|must match the size|shape mismatch|same size|batch_size", _sizes),
    (r"result type|Found dtype|same dtype|expected scalar type|not implemented for '", float_targets),
)
