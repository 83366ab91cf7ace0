"""Put other values into the model's tensors for a while, such as weight averages during an evaluation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hocket.basics.plugin_errors import ConflictError, PluginError


class BorrowedTensors:
    """Track which plug-in has borrowed which of the model's tensors. Plug-ins call `State.borrow` and `State.give_back`.

    Tensors keep their identity and memory, so that optimizers and wrappers of the model keep their references.
    """

    def __init__(self) -> None:
        #: By borrower: each tensor with a copy of its training value.
        self._kept: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def borrower(self, tensors: Iterable[Tensor]) -> str | None:
        """Return the name of the plug-in that has borrowed one of these tensors, or None."""
        asked = {id(tensor) for tensor in tensors}
        return next((who for who, kept in self._kept.items() if any(id(tensor) in asked for tensor, _ in kept)), None)

    def borrow(self, who: str, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each value into its tensor, and keep the training value.

        Raises ConflictError if one of the tensors is borrowed already: the second borrower would keep the values of the first,
        and give those back as training values.
        """
        pairs = list(values)
        if (first := self.borrower(tensor for tensor, _ in pairs)) is not None:
            raise ConflictError(
                f"{who} cannot put values into the model while {first} has its own there. Remove one of the two; a plug-in "
                "that should give way to others asks state.borrower(tensors) first."
            )
        self._kept.setdefault(who, []).extend((tensor, tensor.detach().clone()) for tensor, _ in pairs)
        with torch.no_grad():
            for tensor, value in pairs:
                tensor.copy_(value)

    def give_back(self, who: str) -> None:
        """Copy the training values back. Does nothing for a plug-in that has borrowed nothing."""
        with torch.no_grad():
            for tensor, value in self._kept.pop(who, ()):
                tensor.copy_(value)

    def give_all_back(self) -> None:
        """Copy all training values back, as after an error."""
        for who in list(self._kept):
            self.give_back(who)

    def check_returned(self, event: str) -> None:
        """Raise PluginError if tensors are still borrowed after ``event``, by which all must be returned."""
        if self._kept:
            raise PluginError(
                f"{' and '.join(self._kept)} borrowed the model's tensors and has not given them back: training would continue "
                f"with the wrong weights. It has to call state.give_back(self) on {event}."
            )
