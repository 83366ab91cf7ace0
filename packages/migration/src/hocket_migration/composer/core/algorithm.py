"""Composer's interface of algorithms, and the adapter that runs them in hocket."""

from __future__ import annotations

from typing import Any, ClassVar

import hocket
from hocket.errors import Unsupported
from hocket_migration.composer.core.event import Event, in_hocket
from hocket_migration.composer.core.state import State


class Algorithm:
    """Base of custom algorithms with Composer's interface. hocket's own, by Composer's names, are in ``composer.algorithms``.

    Example:
        >>> from hocket_migration.composer import Algorithm, Event
        >>> class ScaleInputs(Algorithm):
        ...     def match(self, event, state):
        ...         return event == Event.BEFORE_FORWARD
        ...     def apply(self, event, state, logger):
        ...         inputs, targets = state.batch
        ...         state.batch = inputs * 0.5, targets
    """

    #: Attributes that Composer's Trainer reads; hocket needs none of them.
    find_unused_parameters: ClassVar[bool] = False
    backwards_create_graph: ClassVar[bool] = False
    required_on_load: ClassVar[bool] = False

    def match(self, event: Event, state: State) -> bool:
        """Whether :meth:`apply` should run on this event."""
        raise Unsupported(f"{type(self).__name__} needs a match(event, state), which returns True or False.")

    def apply(self, event: Event, state: State, logger: Any) -> int | None:
        """Act on the event."""
        raise Unsupported(f"{type(self).__name__} needs an apply(event, state, logger).")

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: tensors, numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""


class AlgorithmAdapter(hocket.Algorithm):
    """Run an algorithm with Composer's interface in a Trainer of hocket's.

    Args:
        algorithm: an object with ``match(event, state)`` and ``apply(event, state, logger)``.
        view: the state that it gets.
    """

    events = in_hocket()

    def __init__(self, algorithm: Algorithm, view: State) -> None:
        self.algorithm, self._view = algorithm, view

    def match(self, event: hocket.Event, state: hocket.State) -> bool:
        """Ask the algorithm; on the first FIT_START, which is an iteration's too, act in :meth:`apply`."""
        view = self._view.bind(state)
        if event is hocket.Event.FIT_START:
            return True
        return view.happens(Event(event.value)) and self.algorithm.match(Event(event.value), view)

    def apply(self, event: hocket.Event, state: hocket.State) -> None:
        """Run the algorithm."""
        view = self._view
        if event is not hocket.Event.FIT_START:
            self.algorithm.apply(Event(event.value), view, view.logger)
            return
        for each in (Event.FIT_START, *([] if state.timestamp.batch else [Event.ITERATION_START])):
            if self.algorithm.match(each, view):
                self.algorithm.apply(each, view, view.logger)

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state."""
        return self.algorithm.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.algorithm.load_state_dict(state_dict)


def adapted(algorithm: Algorithm, view: State) -> hocket.Algorithm:
    """Return an adapter whose class has the name of the algorithm's, so that plans and messages name it."""
    made = type(type(algorithm).__name__, (AlgorithmAdapter,), {"__doc__": type(algorithm).__doc__})
    return made(algorithm, view)  # type: ignore[no-any-return]  # a subclass
