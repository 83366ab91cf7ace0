"""Check outputs and targets of the first batch, whose loss may be wrong without an error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from hocket.basics.losses import Loss
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket.state.task import SupervisedTask, Task

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.state.state import State

#: The start of torch's warning for a loss that broadcasts.
_BROADCASTS = "Using a target size"


@contextmanager
def checked(state: State) -> Iterator[None]:
    """Check the task's first loss inside, once the default action computes it. Later ones are not slowed down."""
    from hocket.loop.actions import DefaultActions

    task = state.task
    actions = next((each.obj for each in state.bus.attachments if isinstance(each.obj, DefaultActions)), None)
    if task.owns_steps or actions is None:
        yield
        return

    def checked_loss(outputs: object, batch: Batch) -> object:
        actions.first_loss = None
        observer, before = _Observer(outputs), numbers_of(task)
        with warnings.catch_warnings(record=True) as caught, nullcontext() if _is_compiled(task) else observer:
            warnings.simplefilter("always")
            returned = task.loss(outputs, batch)
        for each in caught:
            if str(each.message).startswith(_BROADCASTS):
                raise WrongValue(_broadcast(str(each.message))) from None
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if observer.refused:
            raise WrongValue(observer.refused)
        if observer.found:
            warn(observer.found)
        if state.eval_label is None and not isinstance(state.train_data, DataLoader):
            _refuse_sample(task, outputs, batch, type(state.train_data).__name__)
        if isinstance(task, SupervisedTask):
            _check_batch(task, batch)
            _check_sample(task, batch)
        if (
            isinstance(returned, tuple)
            and len(returned) == 2
            and not isinstance(returned, Loss)
            and state.eval_label is None
        ):
            _check_weight(returned[1], task, batch, outputs)
        _check_connected(returned, state)
        _check_numbers(task, before, state)
        return returned

    actions.first_loss = checked_loss
    try:
        yield
    finally:
        actions.first_loss = None


def numbers_of(task: Task) -> dict[str, int | float | str]:
    """Return the numbers and texts among the attributes of a task."""
    return {name: each for name, each in vars(task).items() if name[0] != "_" and isinstance(each, int | float | str)}


def _check_numbers(task: Task, before: dict[str, int | float | str], state: State) -> None:
    """Warn of a loss that counts, where it is called more often than once a batch, or what it counts is to be saved."""
    changed = [name for name, each in numbers_of(task).items() if before.get(name) != each]
    saved = any(each.name == "checkpoints" for each in state.bus.attachments)
    divided = state.microbatch is not None or state.strategy.world_size > 1
    if changed and (saved or divided):
        warn(
            f"The loss of {type(task).__name__} changes self.{changed[0]}. It is called for each microbatch, and a resumed run "
            f"begins with the first value. Change self.{changed[0]} in batch_end(self, state) of the task, and return it from "
            "extra_state()."
        )


def _is_compiled(task: Task) -> bool:
    """Whether torch.compile has compiled the loss, which it would compile again under a mode."""
    function = task.loss_function if isinstance(task, SupervisedTask) else task.loss
    return hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")


def _broadcast(warned: str) -> str:
    shapes = [part.partition("])")[0].partition("([")[2] for part in warned.split("torch.Size")[1:3]]
    found = f"outputs of shape ({shapes[1]}) and targets of shape ({shapes[0]})" if len(shapes) == 2 else warned
    return (
        f"The loss was given {found}, which broadcast: each output is compared with every target. Both should have the same "
        "shape. Write outputs.squeeze(1) at the end of the model, or targets.unsqueeze(1) in the data."
    )


def _may_broadcast(outputs: object) -> bool:
    """Whether there is one output for each sample, which targets of shape (samples,) or (samples, 1) may not fit."""
    return isinstance(outputs, Tensor) and outputs.dim() in (1, 2) and outputs.numel() == len(outputs) > 1


class _Observer(TorchFunctionMode):
    """Watch which functions of torch a loss function calls, and with what.

    The operation that made a tensor tells whether it holds logits or probabilities; values are not read, so nobody waits for a
    device.
    """

    def __init__(self, outputs: object) -> None:
        super().__init__()
        self._pairs = _may_broadcast(outputs)
        #: A reason to refuse the loss, and one to warn of it.
        self.refused = self.found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        scores = args[0] if args else given.get("input")
        if name in _TAKES and isinstance(scores, Tensor):
            self._check_scale(name, scores)
        result = func(*args, **given)
        if self._pairs and isinstance(result, Tensor) and result.dim() == 2 and len(args) == 2:
            n = len(result)
            shapes = [tuple(each.shape) for each in args if isinstance(each, Tensor)]
            if result.shape == (n, n) and n > 1 and sorted(shapes) == [(n,), (n, 1)]:
                self.found = (
                    f"The loss function combined tensors of shapes {shapes[0]} and {shapes[1]}, which gives {(n, n)}: each "
                    "output is compared with every target. If that is not meant, write outputs.squeeze(1), or "
                    "targets.unsqueeze(1)."
                )
        return result

    def _check_scale(self, name: str, scores: Tensor) -> None:
        made_by = _made_by(scores)
        kind, layer, instead = _TAKES[name]
        found = f"{name} takes {kind}, and the outputs of shape {tuple(scores.shape)} are"
        squashed = {"SoftmaxBackward": "softmax", "SigmoidBackward": "sigmoid"}.get(made_by)
        if kind == "log-probabilities":
            if made_by in _OF_A_LAYER or squashed:
                self.refused = f"{found} those of a {squashed or 'layer'} ({made_by}). {layer}"
        elif squashed:
            self.found = (
                f"{found} probabilities, those of a {squashed}: training is much slower. Remove the {squashed} at the end of "
                f"the model{instead}."
            )


def _made_by(tensor: Tensor) -> str:
    """Return the name of the operation that computed the values of a tensor, such as ``"SoftmaxBackward"``, or empty."""
    node = tensor.grad_fn
    while node is not None and (name := node.name().rstrip("0123456789")) in _SAME_VALUES:
        node = node.next_functions[0][0]
    return "" if node is None else name


def _check_connected(returned: object, state: State) -> None:
    """Refuse a loss whose gradient reaches no parameter, such as one that was detached and then set to require gradients."""
    given = (
        returned.values() if isinstance(returned, Mapping) else returned if isinstance(returned, tuple) else [returned]
    )
    losses = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
    held = {id(each) for optimizer in state.optimizers for group in optimizer.param_groups for each in group["params"]}
    nodes: list[Any] = [each.grad_fn for each in losses if each.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        # What a custom function computes gradients of is not known.
        if isinstance(node, BackwardCFunction) or isinstance(leaf, nn.Parameter) or id(leaf) in held:
            return
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        nodes += new
    if losses:
        raise WrongValue(
            "The loss requires gradients, but was not computed from parameters of the model, so nothing would be trained. "
            "Return the tensor that was computed from the model's outputs, without .detach(), .item(), .data, "
            "torch.tensor(loss) or requires_grad_() on the way."
        )


def _targets(task: Task, batch: Batch) -> object:
    """Return the targets in a batch, or None if they are not known."""
    if isinstance(task, SupervisedTask):
        return None if task.loss_function is None else task.targets_of(batch)
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def _refuse_sample(task: Task, outputs: object, batch: Batch, kind: str) -> None:
    """Refuse a sample in the place of a batch: one target, and outputs without a dimension for samples."""
    target = _targets(task, batch)
    single = isinstance(target, Tensor) and not target.dim() and isinstance(outputs, Tensor) and outputs.dim() < 2
    if single and type(task).count is Task.count:
        raise WrongType(
            f"The training data ({kind}) yields samples and not batches: the target of the first is one number. Wrap it in a "
            "loader: «train_data=torch.utils.data.DataLoader(data, batch_size=32)¦train_data='module:function'», or "
            "«batch_size=None» if its items are batches."
        )


def _check_batch(task: SupervisedTask, batch: Batch) -> None:
    """Warn of items of a batch that neither the model nor the loss gets, unless the Trainer was told where its two are."""
    told = task.loss_function is None or task.inputs is not None or task.targets is not None
    if told or not isinstance(batch, tuple | list) or len(batch) < 3:
        return
    unused = ", ".join(f"batch[{index}]" for index in range(2, len(batch)))
    warn(
        f"A batch is a {type(batch).__name__} of {len(batch)}, and nothing uses {unused}: the model gets batch[0], and the "
        "loss batch[1]. To use it, pass «targets=lambda batch: batch[1:]» with «loss=lambda outputs, rest: …», or write a "
        "hocket.Task. Otherwise write «inputs=0», «targets=1»."
    )


def _check_sample(task: SupervisedTask, batch: Batch) -> None:
    """Warn of a single sample in the place of a batch: its inputs have dimensions, and its target is one number."""
    try:
        inputs, target = task.inputs_of(batch), task.targets_of(batch)
    except (LookupError, TypeError):
        return
    if task.loss_function is None or not isinstance(inputs, Tensor) or not inputs.dim():
        return
    if isinstance(target, int | float) or (isinstance(target, Tensor) and not target.dim()):
        warn(
            f"A batch has inputs of shape {tuple(inputs.shape)} and one number as the target, so it looks like a single "
            f"sample, and is counted as {len(inputs)} samples. Write DataLoader(dataset, batch_size=32), not "
            "«batch_size=None»; or give the target a dimension of samples."
        )


def _right(task: Task, batch: Batch, outputs: object) -> int | None:
    """Return how many class labels the outputs predict; None for others, or few of them, or with labels to ignore."""
    targets = _targets(task, batch)
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if outputs.dim() != 2 or targets.shape != outputs.shape[:1] or targets.is_floating_point():
        return None
    return None if len(targets) < 8 or targets.min() < 0 else int((outputs.argmax(1) == targets).sum()) or None


def _check_weight(weight: Tensor | float, task: Task, batch: Batch, outputs: object) -> None:
    """Refuse or warn of an accuracy, or another value, in the place of the weight. It is read once, in the first batch.

    Sums of sample weights may be fractions, so only a weight below 1 for several samples is hardly meant, and one that is
    the number of right predictions.
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
        "alone and write «metrics='accuracy'», or return {'total': loss, 'accuracy': accuracy}."
    )
    if not math.isfinite(number):
        raise WrongValue(said)
    if 0 < number < 1 < samples or (number != samples and number == _right(task, batch, outputs)):
        warn(f"{said} It is used as it is, which is right for a sum of sample weights.")


_LOG = "Write «loss=torch.nn.functional.cross_entropy», which takes logits, or end the model with torch.nn.LogSoftmax(dim=1)."
_SCALE = "Write outputs.log_softmax(1) in the loss, or end the model with torch.nn.LogSoftmax(dim=1)."
_LOGITS = ", or write «loss=lambda outputs, targets: torch.nn.functional.nll_loss(outputs.log(), targets)»"
_BINARY = ", or write «loss=torch.nn.functional.binary_cross_entropy»"
#: What functions of torch take; what to write instead of a layer's outputs, and instead of removing a softmax or a sigmoid.
_TAKES = {
    "cross_entropy": ("logits", "", _LOGITS),
    "log_softmax": ("logits", "", ""),
    "binary_cross_entropy_with_logits": ("logits", "", _BINARY),
    "nll_loss": ("log-probabilities", _LOG, ""),
    "kl_div": ("log-probabilities", _SCALE, ""),
}
#: Operations whose results are not log-probabilities.
_OF_A_LAYER = ("AddmmBackward", "MmBackward", "LinearBackward", "ConvolutionBackward", "ReluBackward")
#: Operations whose results have the values of their input, in another shape or dtype.
_SAME_VALUES = (
    "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward", "TransposeBackward",
    "PermuteBackward", "TBackward", "CloneBackward", "ToCopyBackward", "SelectBackward", "SliceBackward", "AliasBackward",
    "IndexBackward",
)  # fmt: skip
