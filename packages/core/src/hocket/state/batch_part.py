"""Find the inputs or the targets in the batches of a run, for algorithms that replace them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from hocket.data.items import get_item, set_item
from hocket.state.task import SupervisedTask

if TYPE_CHECKING:
    from hocket.basics.types import Batch
    from hocket.state.state import State


class BatchPart:
    """Where an algorithm finds the inputs, or the targets, of a batch.

    Args:
        owner: the name of the algorithm, for messages.
        which: ``"input"`` or ``"target"``; the argument of the algorithm and of the Trainer are named after it.
        key: an index, a key or an attribute; None for the Trainer's ``inputs=`` or ``targets=``, or else index 0 or 1.

    Example:
        >>> import hocket, torch
        >>> from hocket.data import BatchPart
        >>> class Invert(hocket.Algorithm):
        ...     events = {hocket.Event.AFTER_DATALOADER}
        ...     phase = hocket.Phase.DATA
        ...     def __init__(self, input_key=None):
        ...         self.images = BatchPart("invert", "input", input_key)
        ...     def apply(self, event, state):
        ...         state.batch = self.images.put(state, 1 - self.images.of(state))
    """

    def __init__(self, owner: str, which: Literal["input", "target"], key: Any = None) -> None:
        self.owner = owner
        self.which = which
        self.key = key

    def of(self, state: State) -> Any:
        """Return this part of ``state.batch``. KeyError if there is nothing. A batch that is a tensor is its inputs."""
        batch = state.batch
        if self._is_whole(batch):
            return batch
        key = self.place(state)
        try:
            return get_item(batch, key)
        except (LookupError, AttributeError, TypeError):
            raise self._missing(batch, f"looked for {self.which}s at {key!r}") from None

    def put(self, state: State, value: Any) -> Any:
        """Return a copy of ``state.batch`` with ``value`` as this part."""
        return value if self._is_whole(state.batch) else set_item(state.batch, self.place(state), value)

    def _is_whole(self, batch: Batch) -> bool:
        return self.which == "input" and self.key is None and isinstance(batch, Tensor)

    def place(self, state: State) -> Any:
        """Return the index, key or attribute in batches, and in the samples that they are made of."""
        if self.key is not None:
            return self.key
        given = getattr(state.task, f"{self.which}s") if isinstance(state.task, SupervisedTask) else None
        if callable(given):
            raise self._missing(state.batch, f"cannot replace what the function given as {self.which}s= returns")
        return (0 if self.which == "input" else 1) if given is None else given

    def _missing(self, batch: Batch, what: str) -> KeyError:
        keys = f" with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        name = repr(list(batch)[0 if self.which == "input" else -1]) if keys else "…"
        where = "" if batch is None else f", in a batch that is a {type(batch).__name__}{keys}"
        return KeyError(
            f"{self.owner} {what}{where}. Pass {self.which}_key: write "
            f"{{'{self.owner}': {{'{self.which}_key': {name}}}}}, or {self.which}s={name} in the Trainer."
        )
