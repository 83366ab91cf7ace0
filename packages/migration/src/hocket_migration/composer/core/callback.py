"""Composer's interface of callbacks, and the adapter that runs them in hocket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hocket
from hocket_migration.composer.core.event import Event
from hocket_migration.composer.core.state import State

if TYPE_CHECKING:
    from hocket_migration.composer.loggers.logger import Logger


class Callback:
    """Base of callbacks with Composer's interface: a method for each event, by its name, with state and logger.

    Example:
        >>> from hocket_migration.composer import Callback
        >>> class PrintLoss(Callback):
        ...     def batch_end(self, state, logger):
        ...         print(state.timestamp.batch.value, state.loss.item())
    """

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Call the method of the event. Override it to get all events in one place."""
        getattr(self, event.value)(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Release resources, as a run ends or an exception is raised."""

    def post_close(self) -> None:
        """Release what other callbacks needed until they were closed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: tensors, numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""


def _nothing(event: Event) -> Any:
    def method(self: Callback, state: State, logger: Logger) -> None:
        pass

    method.__name__, method.__doc__ = event.value, f"Do nothing on {event.name}."
    return method


for _event in Event:
    setattr(Callback, _event.value, _nothing(_event))


def adapted(callback: Callback, view: State, base: type[hocket.Callback] = hocket.Callback) -> Any:
    """Return a callback of hocket's that calls one with Composer's interface, on the events that it defines.

    Args:
        callback: the callback.
        view: the state that it gets.
        base: the class of hocket's that the result is an instance of.
    """
    kind = type(callback)
    every = kind.run_event is not Callback.run_event
    named = {event.value for event in Event if getattr(kind, event.value) is not getattr(Callback, event.value)}
    wanted = {event.value for event in hocket.Event} & {event.value for event in Event} if every else set(named)
    methods: dict[str, Any] = {name: _calling(Event(name)) for name in wanted if not name.startswith("iteration")}
    if every or "iteration_start" in named:
        methods["fit_start"] = _fit_start
    methods |= {
        "__doc__": kind.__doc__,
        "__init__": _keep,
        "state_dict": _state,
        "load_state_dict": _load,
        "close": _close,
    }
    return type(kind.__name__, (base,), methods)(callback, view)


def _calling(event: Event) -> Any:
    def method(self: Any, state: hocket.State) -> None:
        view = self._view.bind(state)
        if view.happens(event):
            self.callback.run_event(event, view, view.logger)

    return method


def _fit_start(self: Any, state: hocket.State) -> None:
    view = self._view.bind(state)
    self.callback.run_event(Event.FIT_START, view, view.logger)
    if not state.timestamp.batch:
        self.callback.run_event(Event.ITERATION_START, view, view.logger)


def _keep(self: Any, callback: Callback, view: State) -> None:
    self.callback, self._view = callback, view


def _state(self: Any) -> dict[str, Any]:
    return self.callback.state_dict()  # type: ignore[no-any-return]  # Composer's interface


def _load(self: Any, state_dict: dict[str, Any]) -> None:
    self.callback.load_state_dict(state_dict)


def _close(self: Any, state: hocket.State) -> None:
    view = self._view.bind(state)
    self.callback.close(view, view.logger)
    self.callback.post_close()
