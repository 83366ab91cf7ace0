"""Objects in the place of data that are no data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from hocket.data.checks import whose_module
from hocket.help import names


def described(data: object, argument: str) -> str:
    """Return what an object is that is no data, and what to do with it, for a message that continues with how to give data.

    Empty for what may be data.
    """
    kind = type(data).__name__
    what, write = "", ""
    if isinstance(data, torch.nn.Module):
        what = f"a model ({kind})"
        write = "The model is an argument of the Trainer: hocket.Trainer(model, train_data).fit(). Write"
    elif isinstance(data, torch.optim.Optimizer):
        what, write = (
            f"an optimizer ({kind})",
            "Give it by name: hocket.Trainer(model, train_data, optimizer=optimizer). Write",
        )
    elif isinstance(data, range | enumerate):
        what, write = f"{kind}, whose items are numbers", "Iterate over the loader itself:"
    elif isinstance(data, bool):
        what, write = repr(data), "Write"
    elif isinstance(data, int | float):
        what, write = (
            f"the number {data!r}",
            f"A duration has a unit: «duration='{data}ep'». Data is an iterable of batches: write",
        )
    elif whose := whose_module(data):
        what = f"a data module ({kind})"
        write = "Give it to the Trainer, which calls its methods: hocket.Trainer(model, data=module). Or write"
        if whose == "lightning":
            write = (
                "Give its loaders: train_data=module.train_dataloader(), eval_data=module.val_dataloader(). Or write"
            )
    elif inspect.isroutine(data) or (isinstance(data, type) and not isinstance(data, Mapping)):
        what = f"the {'class' if isinstance(data, type) else 'function'} {data.__name__}"
        write = (
            f"Call it: {argument}=list({data.__name__}(…)); or, to read batches anew in each epoch, give an object whose "
            "__iter__ does. Or write"
        )
    elif hasattr(data, "train") and hasattr(data, "valid"):
        what = f"a pair of loaders ({kind})"
        write = "Write «train_data=data.train», «eval_data=data.valid»; or"
    elif names.library(data) and hasattr(data, "to_dict") and hasattr(data, "learning_rate"):
        what, write = f"{kind} of {names.library(data)}", "Each setting is an argument of the Trainer. Write"
    elif callable(data) and not hasattr(type(data), "__iter__") and not hasattr(type(data), "__getitem__"):
        what, write = f"{kind}, a function", "A loss is given by name: «loss=». Write"
    return f"{what}, and not an iterable of batches. {write}" if what else ""
