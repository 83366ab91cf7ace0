"""Methods that subclasses of transformers' Trainer override, and which of them hocket's loop can honour."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from hocket.errors import WrongType

#: Methods of the Trainer that hocket's loop does not call, and what to override or pass instead.
REFUSED: Mapping[str, str] = {
    "training_step": (
        "it computes gradients, which hocket does; override compute_loss, or write a hocket.Callback or algorithm and pass "
        "hocket={'callbacks': [...]}"
    ),
    "evaluation_loop": "hocket evaluates; override prediction_step, or pass compute_metrics or preprocess_logits_for_metrics",
    "_inner_training_loop": "hocket trains; pass hocket={'callbacks': [...]} for what it adds to the loop",
    "_run_epoch": "hocket trains; pass hocket={'callbacks': [...]} for what it adds to the loop",
    "_prepare_for_training": "hocket prepares model and optimizer; override create_optimizer or create_scheduler",
    "_wrap_model": "hocket wraps the model; pass hocket={'strategy': ...}",
    "create_accelerator_and_postprocess": "hocket makes the strategy; pass hocket={'strategy': ..., 'precision': ...}",
    "autocast_smart_context_manager": "the precision of hocket does this; pass hocket={'precision': ...}",
    "_clip_grad_norm": "hocket clips; pass hocket={'clip_gradients': ('value', 0.5)}",
    "_get_grad_norm": "hocket computes the norm; pass hocket={'callbacks': ['optimizer-monitor']}",
    "_update_auto_batch_size": "pass hocket={'microbatch': 'auto'}",
    "hyperparameter_search": "use `hocket sweep`",
    "_hp_search_setup": "use `hocket sweep`",
    "prediction_loop": "transformers does not call it any more; override prediction_step",
}

#: The decision of callbacks that hocket does not act on.
IGNORED_DECISION = "should_epoch_stop"

#: Names of losses that are means over a batch.
_MEANS = re.compile(r"(Loss|cross_entropy|_loss)$")


def check(kind: type, own: type, theirs: type) -> None:
    """Raise TypeError if a subclass of ``own`` overrides a method of ``theirs`` that hocket's loop cannot honour."""
    for name, instead in REFUSED.items():
        for cls in kind.__mro__[: kind.__mro__.index(own)]:
            if name in vars(cls) and not cls.__module__.startswith(("transformers.", "hocket_migration.")):
                raise WrongType(
                    f"{cls.__name__} overrides {name}, which hocket does not call: {instead}. To keep the override, keep "
                    f"transformers.{theirs.__name__}."
                )


def ignores_items(function: Callable[..., Any]) -> bool:
    """Whether a function that returns a loss certainly does not divide it by ``num_items_in_batch``, judged by its code.

    For the ``compute_loss`` of a subclass, a ``compute_loss_func`` or the ``forward`` of a model.

    Example:
        >>> from hocket_migration.transformers.overrides import ignores_items
        >>> def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ...     return cross_entropy(model(**inputs).logits, inputs["labels"])
        >>> ignores_items(compute_loss)
        True
    """
    function = inspect.unwrap(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return False
    used = {str(each.argval) for each in dis.get_instructions(code)}
    keywords = code.co_flags & inspect.CO_VARKEYWORDS
    passes_on = bool(keywords) and code.co_varnames[code.co_argcount + code.co_kwonlyargcount] in used
    if "num_items_in_batch" in used or "loss_function" in used:
        return False
    return any(_MEANS.search(each) for each in used) or not passes_on
