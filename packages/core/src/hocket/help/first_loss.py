"""Check outputs and targets of the first batch of a fit, whose loss may be wrong without an error."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from hocket.losses import Loss
from hocket.task import SupervisedTask, Task

#: The start of torch's warning for a loss that broadcasts.
_BROADCASTS = "Using a target size"


def watch(task: Task, data: Any = None) -> None:
    """Check the task's next loss. Later ones are not slowed down: the check removes itself.

    Args:
        data: the training data.
    """
    if task.owns_steps or "loss" in vars(task):
        return

    def checked(outputs: Any, batch: Any) -> Any:
        vars(task).pop("loss", None)
        pairs = _Pairs()
        with warnings.catch_warnings(record=True) as caught, pairs if _may_broadcast(outputs) else nullcontext():
            warnings.simplefilter("always")
            returned = task.loss(outputs, batch)
        for each in caught:
            if str(each.message).startswith(_BROADCASTS):
                raise ValueError(_broadcast(str(each.message), outputs)) from None
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if pairs.found:
            warnings.warn(pairs.found, stacklevel=3)
        if not isinstance(data, DataLoader):
            _check_sample(task, outputs, batch, type(data).__name__)
        if isinstance(task, SupervisedTask):
            _check_batch(task, batch)
            if isinstance(outputs, Tensor):
                _check_scale(task.loss_function, outputs)
        if isinstance(returned, tuple) and len(returned) == 2 and not isinstance(returned, Loss):
            _check_weight(returned[1], task, batch)
        return returned

    vars(task)["loss"] = checked  # found before the method of the class


def _broadcast(warned: str, outputs: Any) -> str:
    shapes = [part.partition("])")[0].partition("([")[2] for part in warned.split("torch.Size")[1:3]]
    found = f"outputs of shape ({shapes[1]}) and targets of shape ({shapes[0]})" if len(shapes) == 2 else warned
    return (
        f"The loss was given {found}, which broadcast: each output is compared with every target. Both should have the same "
        "shape. Write outputs.squeeze(1) at the end of the model, or targets.unsqueeze(1) in the data."
    )


def _may_broadcast(outputs: Any) -> bool:
    """Whether there is one output for each sample, which targets of shape (samples,) or (samples, 1) may not fit."""
    return isinstance(outputs, Tensor) and outputs.dim() in (1, 2) and outputs.numel() == len(outputs) > 1


class _Pairs(TorchFunctionMode):
    """Look for an operation that makes a matrix out of tensors of shapes (n,) and (n, 1), as a written loss may do."""

    found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2 and len(args) == 2:
            n = len(result)
            shapes = [tuple(each.shape) for each in args if isinstance(each, Tensor)]
            if result.shape == (n, n) and n > 1 and sorted(shapes) == [(n,), (n, 1)]:
                self.found = (
                    f"The loss function combined tensors of shapes {shapes[0]} and {shapes[1]}, which gives {(n, n)}: each "
                    "output is compared with every target. If that is not meant, write outputs.squeeze(1), or "
                    "targets.unsqueeze(1)."
                )
        return result


def _check_sample(task: Task, outputs: Any, batch: Any, kind: str) -> None:
    """Refuse a sample in the place of a batch: one target, and outputs without a dimension for samples."""
    if isinstance(task, SupervisedTask):
        target = None if task.loss_function is None else task.targets_of(batch)
    else:
        target = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
    single = isinstance(target, Tensor) and not target.dim() and isinstance(outputs, Tensor) and outputs.dim() < 2
    if single and type(task).count is Task.count:
        raise TypeError(
            f"The training data ({kind}) yields samples and not batches: the target of the first is one number. Wrap it in a "
            "loader: train_data=torch.utils.data.DataLoader(data, batch_size=32), or batch_size=None if its items are batches."
        )


def _check_batch(task: SupervisedTask, batch: Any) -> None:
    """Warn of items of a batch that neither the model nor the loss gets, unless the Trainer was told where its two are."""
    told = task.loss_function is None or task.inputs is not None or task.targets is not None
    if told or not isinstance(batch, tuple | list) or len(batch) < 3:
        return
    unused = ", ".join(f"batch[{index}]" for index in range(2, len(batch)))
    warnings.warn(
        f"A batch is a {type(batch).__name__} of {len(batch)}, and nothing uses {unused}: the model gets batch[0], and the "
        "loss batch[1]. To use it, pass targets=lambda batch: batch[1:] with loss=lambda outputs, rest: …, or write a hocket."
        "Task. Otherwise write inputs=0, targets=1.",
        stacklevel=4,
    )


def _check_weight(weight: Any, task: Task, batch: Any) -> None:
    """Refuse or warn of an accuracy, or another value, in the place of the weight. It is read once, in the first batch.

    Sums of sample weights may be fractions, so only a weight below 1 for several samples is hardly meant.
    """
    if isinstance(weight, Tensor) and (weight.numel() != 1 or weight.requires_grad):
        return  # refused where the loss is used
    try:
        number, counted = float(weight), task.count(batch)
    except (TypeError, ValueError):
        return
    samples = counted[0] if isinstance(counted, tuple) else counted
    said = (
        f"The loss function returned (mean, weight) with the weight {number:.4g} for {samples} samples. The weight is the "
        "number of elements in the mean, such as samples or tokens that count. To report an accuracy, return the loss "
        "alone and write metrics='accuracy', or return {'total': loss, 'accuracy': accuracy}."
    )
    if not math.isfinite(number):
        raise ValueError(said)
    if 0 < number < 1 < samples:
        warnings.warn(f"{said} It is used as it is, which is right for a sum of sample weights.", stacklevel=4)


def _check_scale(loss: Callable[..., Any] | None, outputs: Tensor) -> None:
    """Refuse or warn of logits where a loss of torch takes log-probabilities, and of probabilities where it takes logits.

    The operation that made the outputs tells; their values are not read, so nobody waits for a device.
    """
    function = loss.func if isinstance(loss, functools.partial) else loss
    made_by = "" if outputs.grad_fn is None else outputs.grad_fn.name().rstrip("0123456789")
    found = f"the outputs of shape {tuple(outputs.shape)} are"
    if (isinstance(function, nn.NLLLoss) or function is F.nll_loss) and made_by in _OF_A_LAYER:
        raise ValueError(
            f"nll_loss takes log-probabilities, and {found} those of a layer ({made_by}). Write "
            "loss=torch.nn.functional.cross_entropy, which takes logits, or end the model with torch.nn.LogSoftmax(dim=1)."
        )
    if (isinstance(function, nn.CrossEntropyLoss) or function is F.cross_entropy) and made_by == "SoftmaxBackward":
        warnings.warn(
            f"cross_entropy takes logits, and {found} probabilities, those of a softmax: training is much slower. Remove the "
            "softmax at the end of the model, or write loss=lambda outputs, targets: "
            "torch.nn.functional.nll_loss(outputs.log(), targets).",
            stacklevel=4,
        )


#: Operations whose results are not log-probabilities.
_OF_A_LAYER = (
    "AddmmBackward",
    "MmBackward",
    "LinearBackward",
    "ConvolutionBackward",
    "SoftmaxBackward",
    "ReluBackward",
)
