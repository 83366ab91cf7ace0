"""Losses: the return types of loss functions, with their weights and reductions."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import WrongType, WrongValue
from hocket.help.names import plain

#: What a loss is over: see `Loss`.
Reduction = Literal["mean", "sum", "batch", "gathered"]
#: The reductions that need the whole batch.
WHOLE = ("batch", "gathered")

#: Functions of torch.nn.functional that are losses of (outputs, targets), and the names that people use for them.
LOSSES = {
    "cross_entropy": "crossentropy crossentropyloss ce celoss categoricalcrossentropy sparsecategoricalcrossentropy xent",
    "binary_cross_entropy_with_logits": "bcewithlogits bcewithlogitsloss bcelogits",
    "binary_cross_entropy": "bce bceloss binarycrossentropy",
    "mse_loss": "mse mseloss l2 l2loss meansquarederror squarederror",
    "l1_loss": "l1 l1loss mae meanabsoluteerror",
    "smooth_l1_loss": "smoothl1 smoothl1loss",
    "huber_loss": "huber huberloss",
    "nll_loss": "nll nllloss negativeloglikelihood",
    "kl_div": "kl kldiv kldivloss kldivergence",
    "poisson_nll_loss": "poisson poissonnllloss poissonnll",
    "soft_margin_loss": "softmargin softmarginloss",
    "multilabel_soft_margin_loss": "multilabelsoftmarginloss",
    "multi_margin_loss": "multimarginloss hinge",
}
_NO_PARTS: Mapping[str, Tensor] = {}


class Loss(NamedTuple):
    """The loss of a (micro)batch, with its weight and reduction.

    ``value``: a scalar tensor, or a dict of named ones, which are added up. ``weight``: the number of elements (samples,
    unmasked tokens, …) in the mean or sum, as a number or scalar tensor; None for the number of samples. ``parts``: the named
    losses that ``value`` is the sum of, for the loggers. ``reduction``: ``"mean"``, ``"sum"``, or one of those below; None for
    the ``loss_reduction`` of the Trainer or the Task, else a mean. ``kept``: for loss functions of `hocket.Task.train_batch`,
    values to return in ``StepResult.kept``: tensors with one entry for each sample, in any nesting.

    A loss over the pairs of a batch, such as a contrastive one, is not a mean over samples. ``"batch"`` says so: microbatches,
    ``accumulate=`` and several ranks, which would compute it on parts of the batch, are refused. ``"gathered"`` says that the
    loss itself gathers the outputs of all ranks, so that several ranks are allowed.

    The loss of a batch is ``sum(weight * value) / sum(weight)`` over its microbatches and ranks, or ``sum(value)`` for a sum,
    so its gradient does not depend on the split into microbatches. Evaluation reports means: ``sum(value) / sum(weight)``
    for sums.

    Example:
        >>> import hocket, torch
        >>> def loss(outputs, targets):
        ...     total = torch.nn.functional.mse_loss(outputs, targets, reduction="sum")
        ...     return hocket.Loss(total, weight=len(targets), reduction="sum")
    """

    value: Tensor
    weight: float | Tensor | None = None
    parts: Mapping[str, Tensor] = _NO_PARTS
    reduction: Reduction | None = None
    kept: Any = None


class Apart:
    """Several losses of one forward pass, each of which updates only the parameters of its own optimizer.

    Return it from loss functions of `hocket.Task.train_batch`, with the names of the step's optimizers.

    Example:
        >>> import hocket
        >>> def both(self, batch):  # step(self.both, batch, "actor", "critic")
        ...     features = self.trunk(batch)
        ...     return hocket.Apart(actor=self.actor_loss(features), critic=self.critic_loss(features))
    """

    def __init__(self, **losses: Tensor) -> None:
        self.losses = losses


def as_loss(returned: object) -> Loss:
    """Convert the return value of a loss function: a scalar Tensor, ``(value, weight)``, a dict of named losses, or a Loss.

    A dict is summed, unless it has a ``"total"``, which is then the loss, while the others are logged. A tensor of one
    element counts as a scalar.
    """
    if isinstance(returned, Tensor):
        loss = Loss(returned)
    elif isinstance(returned, Loss):
        loss = returned
        if not isinstance(loss.parts, Mapping):
            raise WrongType(f"{_PARTS} is {type(loss.parts).__name__}. {_NAMED} Write parts={{'a': a, 'b': b}}.")
        _check_named(loss.parts, f"{_PARTS} has {{name!r}}, which")
        if isinstance(loss.value, Mapping):
            named = as_loss(loss.value)
            loss = loss._replace(value=named.value, parts={**named.parts, **loss.parts})
        elif not isinstance(loss.value, Tensor):
            raise WrongType(
                f"The value of a hocket.Loss is {type(loss.value).__name__}. It may be a scalar tensor, or a dict of named "
                f"ones, which are added up. {_advice(loss.value)}"
            )
        _check_weight(loss.weight)
        if loss.reduction is not None and loss.reduction not in get_args(Reduction):
            raise WrongValue(
                f"«reduction={loss.reduction!r}» of a hocket.Loss is neither 'mean' nor 'sum', 'batch' or 'gathered'."
            )
    elif isinstance(returned, Mapping) and returned:
        loss = _named(returned)
        if "total" not in returned:
            _check_added(returned)
    elif isinstance(returned, Apart):
        loss = _named(returned.losses)
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor | Mapping):
        _check_weight(returned[1])
        loss = as_loss(returned[0])._replace(weight=returned[1])
    else:
        raise WrongType(
            f"The loss function returned {type(returned).__name__}. It may return a scalar tensor (the mean over the "
            "samples), (mean, weight) where weight is the number of elements in the mean, or a dict of named scalar tensors, "
            f"which are added up. {_advice(returned)}"
        )
    if loss.value.dim() and loss.value.numel() == 1:
        return loss._replace(value=loss.value.squeeze())
    if loss.value.dim():
        raise WrongValue(
            f"The loss has shape {tuple(loss.value.shape)} but must be a scalar. Take the mean, for instance with "
            "«reduction='mean'»; if that mean is not over samples, return (mean, weight)."
        )
    return loss


def _advice(returned: object) -> str:
    if returned is None:
        return "End the function with a return statement, such as return loss."
    if isinstance(returned, int | float) or hasattr(returned, "__array__"):
        return "A number has no gradient: return the tensor, without .item() or .numpy()."
    if isinstance(returned, Loss | Apart):
        return f"Return that {type(returned).__name__} itself."
    return "Add several losses up, or name them: {'a': a, 'b': b}."


def _check_named(losses: Mapping[str, Any], what: str) -> None:
    for name, value in losses.items():
        if not isinstance(value, Tensor) or value.dim():
            kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            if isinstance(value, Mapping):
                inner = next(iter(value), "b")
                raise WrongType(
                    f"{what.format(name=name)} is {kind}. {_NAMED} Give each a name of its own: {{'{name}/{inner}': …}}."
                )
            raise WrongType(
                f"{what.format(name=name)} is {kind}. {_NAMED} Remove {name!r}; to report a value write «metrics='accuracy'», "
                f"or state.log({{{name!r}: value}}) in a callback."
            )


_PARTS, _NAMED = "parts= of a hocket.Loss", "Named losses are scalar tensors, which are added up."


def _named(losses: Mapping[str, Any]) -> Loss:
    _check_named(losses, "The loss named {name!r}")
    if "total" not in losses:
        if (near := next((name for name in losses if plain(name) in _TOTALS), None)) and len(losses) > 1:
            raise WrongValue(
                f"The loss function returned a dict of {', '.join(map(repr, losses))}, which would be added up. If {near!r} is "
                "their sum, call it 'total', so that it is the loss and the others are only logged."
            )
        if "loss" in losses and len(losses) > 1:
            raise WrongValue(
                f"The loss function returned a dict of {', '.join(map(repr, losses))}, which would be added up. If 'loss' is "
                "the loss to train on, call it 'total'; the others are then logged. If it is one of several, rename it."
            )
        return Loss(torch.stack(list(losses.values())).sum(), None, {k: v.detach() for k, v in losses.items()})
    return Loss(losses["total"], None, {k: v.detach() for k, v in losses.items() if k != "total"})


def _check_added(losses: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a value beside losses, such as an accuracy, which would be added to them.

    In training it has no gradient while another has one; a constant 0, as of a loss that does not apply to a batch, is allowed.
    Without gradients, as in evaluation, only its name tells.
    """
    constant = {name: value for name, value in losses.items() if not value.requires_grad}
    if not constant:
        return
    training = len(constant) < len(losses)
    for name, value in constant.items():
        if (value != 0) if training else len(losses) > 1 and name.lower() in _NOTLOSSES:
            raise WrongValue(
                f"The loss function returned a dict of {', '.join(map(repr, losses))}, which would be added up, and {name!r} "
                f"{'has no gradient' if training else 'is not a loss'}: call the loss 'total', so that the others are only "
                "logged, or use «metrics=». If it is a constant term of the loss, give the sum: "
                f"{{'total': {' + '.join(losses)}}}."
            )


_TOTALS = ("total", "totalloss", "losstotal", "sumloss", "overall", "overallloss")
_NOTLOSSES = ("accuracy", "acc", "top1", "f1")


def _check_weight(weight: object) -> None:
    if weight is None or (isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0):
        return
    if not isinstance(weight, Tensor):
        raise WrongType(
            f"The loss function returned (mean, weight) with the weight {weight!r}. A weight is the number of elements in the "
            "mean: a number or a scalar tensor, 0 or more."
        )
    if weight.requires_grad and weight.dim():
        raise WrongValue(
            f"The loss function returned a loss and a tensor of shape {tuple(weight.shape)}; a tuple is (mean, weight). For "
            "outputs return the loss alone: metrics and plug-ins see the outputs anyway. For a state to keep from batch to "
            "batch, return hocket.Loss(loss, kept=state)."
        )
    if weight.requires_grad:
        raise WrongValue(
            "The loss function returned two tensors with gradients. A tuple is (mean, weight), where weight is the number of "
            "elements in the mean, such as a number of tokens. Return the sum of two losses, a + b, or a dict of them, "
            "{'a': a, 'b': b}. Return a weight that depends on parameters as weight.detach()."
        )
    if weight.dim():
        raise WrongValue(
            f"The loss function returned (mean, weight) with a weight of shape {tuple(weight.shape)}. It should be a scalar, "
            "the number of elements in the mean, such as mask.sum()."
        )


def reduction_of(loss: object) -> Reduction | None:
    """Return the declared reduction of a loss function such as ``torch.nn.MSELoss(reduction="sum")``, or None if unknown."""
    given = loss.keywords.get("reduction") if isinstance(loss, functools.partial) else getattr(loss, "reduction", None)
    return given if given in ("sum", *WHOLE) else None


def own_loss(outputs: object) -> Any:
    """Return the loss in the outputs of a model that computes it itself (as in transformers), or None."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def classes(loss: Any) -> tuple[Tensor | None, int] | None:
    """Return class weights and the label to ignore of one of torch's classification losses; None for other losses."""
    keywords: Mapping[str, Any] = {}
    if isinstance(loss, functools.partial) and not loss.args:
        loss, keywords = loss.func, loss.keywords
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        return loss.weight, loss.ignore_index
    if loss in (F.cross_entropy, F.nll_loss):
        return keywords.get("weight"), keywords.get("ignore_index", -100)
    return None


def named_loss(text: str) -> str | None:
    """Return the function of torch.nn.functional that a text names, or None."""
    wanted = plain(text.rpartition(".")[2])
    return next((name for name, others in LOSSES.items() if wanted == plain(name) or wanted in others.split()), None)
