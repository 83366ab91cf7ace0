"""``batch_transform=``: functions of the whole batch, on its device, before everything else that acts on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.basics.short_repr import short
from hocket.data.batch_placement import move
from hocket.data.nesting import map_tensors
from hocket.errors import WrongType, WrongValue
from hocket.hookspecs.attachment import Attachment

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.state.state import State

Transform = Callable[[Any], Any]


class BatchTransform:
    """Replace each batch by what functions return for it, in the first listeners of the events in which a batch is new.

    Modules are moved to the device, and are in eval mode in evaluation and prediction. Nothing is recorded for gradients.
    Random transforms draw from the global generators, which a checkpoint holds and an evaluation restores.

    Args:
        given: the Trainer's argument.

    Raises:
        TypeError: it is neither a function, nor a list of them, nor a mapping of them for ``"train"`` and ``"eval"``.
    """

    def __init__(self, given: Any) -> None:
        split = isinstance(given, Mapping)
        if split and (wrong := [key for key in given if key not in ("train", "eval")] or ["nothing"] * (not given)):
            raise WrongType(f"batch_transform has {short(wrong[0])}. {_FORMS}")
        self._train = _functions(given.get("train", ()) if split else given)
        self._eval = _functions(given.get("eval", ()) if split else given)

    @property
    def batch_transforms(self) -> Sequence[Transform]:
        """All functions, whose state checkpoints hold."""
        return [*self._train, *self._eval]

    @classmethod
    def attachment(cls, given: object) -> Attachment:
        """Return it as an attached plug-in, of the kind that is called first."""
        return Attachment("actions", "batch-transform", cls(given))

    def after_dataloader(self, state: State) -> None:
        """Transform a batch of the training data."""
        self._apply(state, self._train, True)

    def eval_batch_start(self, state: State) -> None:
        """Transform a batch of an evaluation set."""
        self._apply(state, self._eval, False)

    def predict_batch_start(self, state: State) -> None:
        """Transform a batch to predict."""
        self._apply(state, self._eval, False)

    def _apply(self, state: State, functions: Sequence[Transform], training: bool) -> None:
        if not functions:
            return
        for function in functions:
            if isinstance(function, nn.Module):
                function.to(state.device).train(training)
        # Sequences and mappings are copied: the data, such as a list of batches, may hold the ones that were loaded.
        batch = map_tensors(lambda tensor: tensor, move(state.batch, state.device))
        with torch.no_grad():
            for function in functions:
                try:
                    batch = function(batch)
                except Exception as error:
                    error.add_note(
                        f"In batch_transform={short(function)}, which gets the whole batch, on {state.device}."
                    )
                    raise
                if batch is None:
                    raise WrongType(
                        f"«batch_transform={short(function)}» returned None for a batch. It returns the batch to train on: the "
                        "one it was given, or another, with `return batch`."
                    )
        if next(_lengths(batch), 1) == 0:
            raise WrongValue(
                f"«batch_transform={short(functions[-1])}» returned a batch without samples. Return at least one; to leave a "
                "batch out, leave it out of the data."
            )
        state.batch = batch


def _lengths(batch: Batch) -> Iterator[int]:
    """Return the length of the first tensor of a batch that has one."""
    lengths: list[int] = []
    map_tensors(lambda tensor: lengths.append(len(tensor)) if tensor.dim() else None, batch)
    return iter(lengths)


def _functions(given: Any) -> Sequence[Transform]:
    functions = given if isinstance(given, list | tuple) else [given]
    if wrong := [function for function in functions if not callable(function) or isinstance(function, type)]:
        raise WrongType(f"«batch_transform={short(wrong[0])}» is not a function of a batch. {_FORMS}")
    return functions


_FORMS = (
    "Give a function that takes a batch on the device and returns a batch, such as torchvision.transforms.v2.RandomErasing(), "
    "a list of them, or {'train': function, 'eval': function}."
)
