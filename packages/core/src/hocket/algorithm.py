"""Algorithms: plug-ins that may change the run."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hocket.hookspecs import Event

if TYPE_CHECKING:
    from torch import nn

    from hocket.state import State


class Phase(enum.IntEnum):
    """When an algorithm acts among those on the same event: what is earlier here acts earlier.

    Example:
        >>> from hocket import Phase
        >>> Phase.DATA < Phase.LOSS  # augmentation acts before label smoothing
        True
    """

    SELECT = 10  # which samples are trained on at all
    DATA = 20  # what the samples look like
    MODEL = 30  # what the model is made of
    PRECISION = 40  # in which numbers its modules compute; sees the modules that MODEL put in
    LOSS = 50  # targets and loss
    GRADIENT = 60  # gradients
    OPTIMIZER = 70  # the optimizer's step
    WEIGHTS = 80  # averages of the weights


class Need(enum.Flag):
    """What an algorithm or a task needs of the strategy it runs under; the plan refuses a strategy that lacks it.

    Example:
        >>> import hocket
        >>> class Prune(hocket.Algorithm):
        ...     needs = hocket.Need.FULL_PARAMETERS
        >>> hocket.Need.SECOND_GRADIENT in Prune.needs
        False
    """

    NOTHING = 0
    FULL_PARAMETERS = enum.auto()  # sees whole parameters, not shards
    SECOND_GRADIENT = enum.auto()  # computes the gradients of a batch more than once
    SEVERAL_STEPS = enum.auto()  # steps some of the optimizers: tasks with a train_batch


class Algorithm:
    """Changes the state on the events that it declares.

    Subclasses set ``events`` and implement :meth:`apply`. They may also implement *actions* by name
    (:mod:`hocket.hookspecs.actions`), wrapped or not, and nothing else by name.

    Order on one event: ``phase``, then ``before`` / ``after``, then the order in which the user named the algorithms. On
    ``after_x`` the user's order is reversed, and algorithms that also act on ``before_x`` come last, in the exact reverse of
    their order there, so that paired work nests.

    Example:
        >>> import hocket, torch
        >>> class InputNoise(hocket.Algorithm):
        ...     events = {hocket.Event.AFTER_DATALOADER}
        ...     phase = hocket.Phase.DATA
        ...     def apply(self, event, state):
        ...         inputs, targets = state.batch
        ...         noise = torch.randn(inputs.shape, generator=state.generator(self))
        ...         state.batch = inputs + 0.1 * noise, targets
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), algorithms=[InputNoise()], device="cpu")
    """

    #: Events on which :meth:`apply` is called.
    events: ClassVar[Collection[Event]] = ()
    phase: ClassVar[Phase] = Phase.MODEL
    #: Names of algorithms that this one must act before / after, and cannot be combined with. Those absent do not matter.
    before: ClassVar[Collection[str]] = ()
    after: ClassVar[Collection[str]] = ()
    conflicts: ClassVar[Collection[str]] = ()
    needs: ClassVar[Need] = Need.NOTHING

    def match(self, event: Event, state: State) -> bool:
        """Whether :meth:`apply` should run now; always, unless overridden. Must not change anything."""
        return True

    def apply(self, event: Event, state: State) -> None:
        """Act. Read and replace what you need in ``state``; ask the loop for things with ``state.request``.

        Random numbers come from ``state.generator(self)``: seeded, of its own, and kept in checkpoints.
        """
        raise NotImplementedError(f"{type(self).__name__} declares events but no apply(event, state)")

    def touches(self, model: nn.Module) -> Sequence[str]:
        """What surgery on ``model`` would replace, for the plan; one readable line each. Changes nothing."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`. Raises ValueError for a key that this algorithm does not know."""
        if state_dict:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state_dict)}")
