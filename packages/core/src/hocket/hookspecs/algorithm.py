"""Algorithms: plug-ins that may change training."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from hocket.basics.plugin_errors import HookError
from hocket.data.stateful import Stateful
from hocket.errors import Unsupported
from hocket.help import names
from hocket.help.attributes import Named
from hocket.hookspecs import Actions, Event
from hocket.hookspecs.needs import Need

if TYPE_CHECKING:
    from torch import nn

    from hocket.state.state import State


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
    #: If a Trainer may have one only, also of subclasses: why, and what to write instead of two. Empty allows several.
    once: ClassVar[str] = ""
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

    def declared_listeners(self, name: str, methods: Collection[str]) -> dict[str, Callable[[State], None]]:
        """Return a listener for each of ``events``, by the name of the hook; the bus calls this as it attaches the algorithm.

        Args:
            name: of the algorithm in its Trainer.
            methods: the hooks that it defines as methods.

        Raises:
            HookError: one of them is no action, or ``events`` and the other declarations have another form.
        """
        events = {event.value for event in Event}
        actions = {action for action in vars(Actions) if not action.startswith("_")}
        if other := [method for method in methods if method not in actions]:
            raise HookError(
                f"Algorithm '{name}' defines {other[0]}(), but algorithms act on events in apply(event, state). Add "
                f"Event.{other[0].upper()} to its `events`, or make it a hocket.Callback."
                if other[0] in events
                else f"Algorithm '{name}' defines {other[0]}(), a hook that algorithms do not implement. They may implement "
                f"actions: {', '.join(sorted(actions))}."
            )
        _check_declarations(self, f"Algorithm '{name}' ({type(self).__name__})")
        if not self.events and type(self).apply is not Algorithm.apply:
            raise HookError(
                f"Algorithm '{name}' defines apply(), which would never be called: it declares no events. Write events = "
                "{hocket.Event.AFTER_LOSS} in the class, with the events to act on."
            )
        return {event.value: _listener(self, event) for event in sorted(self.events, key=lambda event: event.value)}


def _listener(algorithm: Algorithm, event: Event) -> Callable[[State], None]:
    """Return the listener of an algorithm for one of its events, as a plain function of the state."""
    apply, match = algorithm.apply, algorithm.match
    if type(algorithm).match is Algorithm.match:
        return lambda state: apply(event, state)

    def listener(state: State) -> None:
        if match(event, state):
            apply(event, state)

    return listener


def _check_declarations(algorithm: Algorithm, who: str) -> None:
    """Raise HookError for an algorithm whose `events`, `phase` or names of other algorithms are of another form."""
    declared: object = algorithm.events
    given = declared if isinstance(declared, Collection) and not isinstance(declared, str) else [declared]
    if given is not declared or not all(isinstance(event, Event) for event in given):
        meant = [str(getattr(event, "value", event)).rpartition(".")[2].lower() for event in given]
        known = [event.value for event in Event]
        near = [names.closest(names.hook(event) or event, known) for event in meant]
        write = ", ".join(f"hocket.Event.{event.upper()}" for event in near if event) or "hocket.Event.AFTER_LOSS"
        raise HookError(
            f"{who} has events = {declared!r}; it should be a set of members of hocket.Event. Write events = {{{write}}}. "
            f"The members are {', '.join(Event.__members__)}."
        )
    for name, kind in (("phase", Phase), ("needs", Need)):
        if not isinstance(value := getattr(algorithm, name), kind | int):
            members = list(kind.__members__)
            like = names.closest(str(value).upper(), members) or members[0]
            raise HookError(
                f"{who} has {name} = {value!r}; it should be a member of hocket.{kind.__name__}. Write {name} = "
                f"hocket.{kind.__name__}.{like}. The members are {', '.join(members)}."
            )
    for name in ("before", "after", "conflicts"):
        others = getattr(algorithm, name)
        if isinstance(others, str) or not isinstance(others, Collection) or not all(isinstance(o, str) for o in others):
            raise HookError(
                f"{who} has {name} = {others!r}; it should be a set of names of algorithms. Write {name} = "
                f"{{{others if isinstance(others, str) else 'label-smoothing'!r}}}."
            )
