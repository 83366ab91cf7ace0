"""Algorithms: plug-ins that may change training."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from hocket.data.stateful import Stateful
from hocket.errors import Unsupported
from hocket.help.attributes import Named
from hocket.hookspecs import Event
from hocket.hookspecs.needs import Need

if TYPE_CHECKING:
    from torch import nn

    from hocket.state import State


class Phase(enum.IntEnum, metaclass=Named):
    """The order of algorithms on the same event: earlier phases act first.

    Example:
        >>> from hocket import Phase
        >>> Phase.DATA < Phase.LOSS  # augmentation acts before label smoothing
        True
    """

    SELECT = 10  # selection of the samples to train on
    DATA = 20  # transforms of the samples
    MIX = 25  # mixtures of samples; runs after DATA, so that it mixes transformed samples
    MODEL = 30  # surgery on the model
    PRECISION = 40  # precision of its modules; runs after MODEL has inserted modules
    LOSS = 50  # targets and loss
    GRADIENT = 60  # gradients
    OPTIMIZER = 70  # the optimizer's step
    WEIGHTS = 80  # averages of the weights


class Algorithm(Stateful):
    """Base class of algorithms, which change the state on the events that they declare.

    Subclasses set ``events`` and implement :meth:`apply`. They may also implement or wrap *actions* by name
    (:mod:`hocket.hookspecs.actions`), but no other hooks.

    The order on one event is ``phase``, then ``before`` / ``after``, then the order in the user's list. On ``after_x`` the
    user's order is reversed, and algorithms that also act on ``before_x`` come last, in the exact reverse of their order
    there, so that paired operations nest.

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
    #: Names of algorithms that this one must precede, must follow, or cannot be combined with. Absent ones are ignored.
    before: ClassVar[Collection[str]] = ()
    after: ClassVar[Collection[str]] = ()
    conflicts: ClassVar[Collection[str]] = ()
    needs: ClassVar[Need] = Need.NOTHING

    def match(self, event: Event, state: State) -> bool:
        """Whether :meth:`apply` should run now; True by default. Must not change anything."""
        return True

    def apply(self, event: Event, state: State) -> None:
        """Act on an event: read and replace attributes of ``state``, or send requests to the loop with ``state.request``.

        Draw random numbers from ``state.generator(self)``, a private seeded generator that checkpoints save.
        """
        raise Unsupported(
            f"{type(self).__name__} declares events but no apply(event, state). Define def apply(self, event, state)."
        )

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return a readable line for each module that surgery on ``model`` would replace. Changes nothing."""
        return ()

    def no_effect(self, state: State) -> str:
        """Return why this algorithm did nothing by its schedule, when training is complete; nothing if it did something.

        A sentence without its subject, with what to write, such as "interval=100 is more than the 10 batches. Lower it.": a
        `hocket.NoEffectWarning` says it after the fit. Decide by the arguments and ``state.timestamp``, so that a resumed run
        says the same. Of a `hocket.Span` that never opens, a fit warns without this.
        """
        return ""
