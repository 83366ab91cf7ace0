"""Explanations of exceptions of the user's model and loss: shapes and dtypes, the probable cause, and what to write.

They are notes of the exception, so its type and message stay. Nothing here runs unless something was raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hocket.help import names
from hocket.loop.steps import RESULT
from hocket.state.task import Task
from hocket_insight.failures import collating, starting_workers, state_calls
from hocket_insight.failures.causes import CAUSES
from hocket_insight.failures.failure import Failure

if TYPE_CHECKING:
    from hocket.basics.types import Batch


def explain(error: BaseException, place: str, *facts: object) -> None:
    """Add a note to an exception that was raised in a place, by its function in `PLACES`."""
    PLACES[place](error, *facts)


def _explain_model(where: str, error: BaseException, task: Task, batch: Batch, outputs: object = None) -> None:
    """Add a note to an exception that was raised in ``"forward"``, ``"loss"`` or ``"backward"``. Never raises."""
    with suppress(Exception):
        failure = Failure(error, where, task, batch, outputs)
        described = "; ".join(f"{name}: {describe(part)}" for name, part in failure.parts().items())
        cause = next(
            (text for pattern, tell in CAUSES[where] if re.search(pattern, failure.text) and (text := tell(failure))),
            "",
        )
        vars(error)["hocket_cause"] = cause  # a tool that reads data raises a Mistake instead where there is one
        place = {"forward": "the forward pass", "loss": "the loss", "backward": "the backward pass"}[where]
        note = f"In {place} of {type(failure.network).__name__}, with {described}. {cause}".rstrip()
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _explain_backward(error: BaseException, loss: object, stepper: bool) -> None:
    """Add a note to an exception of ``Runtime.backward``. Never raises."""
    with suppress(Exception):
        if not isinstance(loss, Tensor):
            error.add_note(
                f"backward(loss) was given {type(loss).__name__}; it takes a scalar tensor. Write the loss as it was "
                "computed, without .item() or float()."
            )
        elif loss.dim():
            error.add_note(
                f"backward(loss) was given a tensor of shape {tuple(loss.shape)}; it takes a scalar. Write loss.mean()."
            )
        elif not loss.requires_grad and stepper:
            error.add_note(
                "The loss has no gradient. step(…) of runtime.stepper computes gradients and steps: after it, omit "
                "runtime.backward and runtime.step."
            )
        elif not loss.requires_grad:
            error.add_note(
                "The loss has no gradient. Write it without .detach(), .item() and torch.no_grad() on the way."
            )


def _explain_metric(error: BaseException, name: str, metric: object, outputs: object, batch: Batch) -> None:
    """Add a note to an exception of a metric's update. Never raises."""
    with suppress(Exception):
        error.add_note(
            f"In the update of metric '{name}' ({type(metric).__name__}), with outputs: {describe(outputs)}; batch: "
            f"{describe(batch)}. {_other_classes(metric, outputs)}A metric gets update(outputs, targets); a hocket.Task "
            "chooses other arguments in update_metric(self, metric, outputs, batch)."
        )


def _other_classes(metric: Any, outputs: Any) -> str:
    """Return what to write instead of a metric of torchmetrics for another number of classes; empty if it is for as many."""
    outputs = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    each = next(iter(metric.values())) if hasattr(metric, "compute_groups") else metric
    kind = type(each).__name__
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or not type(each).__module__.startswith("torchmetrics"):
        return ""
    classes = outputs.shape[1]
    expected = getattr(each, "num_classes", None) or getattr(each, "num_labels", None)
    if kind.startswith("Binary") and classes == 1:
        return "The outputs are (samples, 1); write outputs.squeeze(1) at the end of the model. "
    if kind.startswith("Binary"):
        several = kind.replace("Binary", "Multiclass")
        return f"The outputs are of {classes} classes, and {kind} takes one. Write {several}({classes}). "
    if isinstance(expected, int) and expected != classes:
        return f"The metric is for {expected} classes, and the outputs are of {classes}. Write {kind}({classes}). "
    return ""


def _explain_step(error: BaseException, batch: Batch) -> None:
    """Add a note to an exception of ``train_batch`` if ``step`` was called, or its result used, in another way."""
    text = str(error)
    call = re.match(r"Steps\.__call__\(\) (missing|got an unexpected keyword argument '(\w+)')", text)
    indexed = "tuple indices must be integers or slices, not str" in text and not isinstance(batch, tuple)
    name = getattr(error, "name", None)
    if (
        isinstance(error, AttributeError)
        and isinstance(error.obj, Task)
        and (text := names.listed(str(name), "task") or "")
    ):
        error.add_note(f"{name!r} belongs to Lightning. Write {text}.")
    elif call and call[2]:
        error.add_note(
            "step(…) takes the names of optimizers by position. Write step(loss_function, batch, 'generator'), for instance."
        )
    elif call:
        function = "loss_function" if batch is None else "self.loss_of"
        error.add_note(
            f"step(…) was not given a batch. Write step({function}, batch): the function itself, which is called with the "
            "batch, perhaps several times, and not a loss that was computed already."
        )
    elif indexed:
        error.add_note(RESULT)


def describe(value: object, depth: int = 2) -> str:
    """Return shapes and dtypes of a batch or of outputs in one line."""
    if isinstance(value, Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}{where}"
    kind = type(value).__name__
    if isinstance(value, Mapping):
        items = [f"{key!r}: {describe(item, depth - 1)}" for key, item in list(value.items())[:8]]
        return f"{kind} {{{', '.join(items)}}}" if depth else kind
    if isinstance(value, list | tuple):
        items = [describe(item, depth - 1) for item in value[:4]] + (["…"] if len(value) > 4 else [])
        return f"{kind} of {len(value)} ({', '.join(items)})" if depth else f"{kind} of {len(value)}"
    return kind if value is not None else "None"


def _explain_others(
    error: BaseException, task: Task, step: str, optimizers: Sequence[str], frozen: Sequence[Tensor]
) -> None:
    """Add a note to an exception of a step that needs a gradient of parameters of other optimizers.

    Args:
        step: the names of the step's optimizers, joined by "+".
        frozen: the parameters that get no gradients in it.
    """
    own = step.split("+")
    others = [name for name in optimizers if name not in own]
    identities = set(map(id, frozen))
    names = [name for name, parameter in task.named_parameters() if id(parameter) in identities]
    error.add_note(
        f"In a step of {', '.join(map(repr, own))} the parameters of {', '.join(map(repr, others))} require no gradient"
        f"{': ' if names else ''}{', '.join(names[:5])}{' …' if names[5:] else ''}. To compute a gradient with respect to "
        f"them in the loss function, name their optimizer too, as in step(…, {own[0]!r}, {others[0]!r}), or use a copy: "
        "weight.detach().requires_grad_(). A tensor of the batch needs requires_grad_() too."
    )


#: The function that explains an exception of each place.
PLACES: Mapping[str, Callable[..., None]] = {
    **{place: partial(_explain_model, place) for place in ("forward", "loss", "backward")},
    "metric": _explain_metric,
    "step": _explain_step,
    "step.others": _explain_others,
    "state": state_calls.explain,
    "collate": collating.explain,
    "workers": starting_workers.explain,
    "runtime.backward": _explain_backward,
}
