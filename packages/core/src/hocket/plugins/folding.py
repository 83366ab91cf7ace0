"""Fold the implementations of a hook into one plain callable, and name the plug-in that an exception came from."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from hocket.basics.plugin_errors import HookError
from hocket.basics.timestamp import Timestamp
from hocket.hookspecs import Event
from hocket.hookspecs.attachment import Attachment
from hocket.plugins.delivery import Delivery


class _Timed(Protocol):
    """A state, as far as intervals ask it."""

    @property
    def timestamp(self) -> Timestamp: ...


def positional(function: Callable[..., Any], wanted: tuple[str, ...], given: tuple[str, ...]) -> Callable[..., Any]:
    """Adapt ``function``, which takes some hook arguments by name, to the positional arguments ``given``."""
    # A parameter with a default still receives the hook's argument of that name: a hook always passes its arguments.
    accepted = [p for p in inspect.signature(function).parameters if p in given]
    if tuple(accepted) == given:
        return function
    positions = [given.index(name) for name in accepted]
    if not positions:
        return lambda *args: function()
    if len(positions) == 1:
        (only,) = positions
        return lambda *args: function(args[only])
    return lambda *args: function(*(args[i] for i in positions))


def finish(delivery: Delivery, hook: str) -> Callable[[object], None]:
    return lambda state: delivery.finish(closing=hook == Event.CLOSE.value)


def silent(*args: object) -> None:
    """Do nothing: the hook has no listeners."""


class Listener(NamedTuple):
    """An implementation of a hook, as a function of the hook's arguments by position."""

    function: Callable[..., Any]
    #: The plug-in to name in its errors; empty for none.
    whose: str = ""
    #: Its interval in batches; 0 for never.
    every: int = 1


def all_of(listeners: Sequence[Listener], counted: bool) -> Callable[..., Any]:
    """Call every listener at its interval.

    Args:
        counted: whether the timestamp counts the current batch already.
    """
    listeners = [listener for listener in listeners if listener.every]
    if not listeners:
        return silent
    if any(listener.every > 1 for listener in listeners):
        return _gated(tuple(listeners), 0 if counted else 1)
    calls = tuple(listener[:2] for listener in listeners)
    if len(calls) == 1 and not listeners[0].whose:
        return listeners[0].function

    def run(*args: object) -> None:
        whose = ""
        try:
            for call, whose in calls:
                if (returned := call(*args)) is not None:
                    _refuse_decision(returned, whose)
        except BaseException as error:
            note(error, whose)
            raise

    return run


def _refuse_decision(returned: object, whose: str) -> None:
    """Raise HookError for a listener that returns a decision, or True or False: what events return is not used."""
    from hocket.state.requests import Decision

    if isinstance(returned, bool | Decision):
        who, _, hook = whose.rpartition(" in ")
        raise HookError(
            f"{who} returns {getattr(returned, 'name', returned)} from {hook}(), which is not used: events return nothing. To "
            "stop, write state.request(hocket.Decision.STOP, reason='…')."
        )


def _gated(listeners: tuple[Listener, ...], ahead: int) -> Callable[..., Any]:
    constant = tuple(listener for listener in listeners if listener.every == 1)
    common = math.gcd(
        *(listener.every for listener in listeners if listener.every > 1)
    )  # others only in multiples of it

    def run(state: _Timed, *args: object) -> None:
        batch = state.timestamp.batch + ahead
        if not constant and batch % common:
            return
        whose = ""
        try:
            for call, whose, every in constant if batch % common else listeners:
                if batch % every == 0 and (returned := call(state, *args)) is not None:
                    _refuse_decision(returned, whose)
        except BaseException as error:
            note(error, whose)
            raise

    return run


def all_despite_errors(calls: list[Callable[..., Any]]) -> Callable[..., Any]:
    """Call every listener even if one raises. Errors become notes on ``state.exception``; without one, the first is raised."""

    def run(state: object) -> None:
        errors: list[Exception] = []
        for call in calls:
            try:
                call(state)
            except Exception as error:
                errors.append(error)
        if not errors:
            return
        main = getattr(state, "exception", None)
        if main is None:
            main = errors.pop(0)
        for other in errors:
            notes = "; ".join(getattr(other, "__notes__", ()))
            main.add_note(f"Meanwhile: {type(other).__name__}: {other} ({notes})")
        if getattr(state, "exception", None) is None:
            raise main

    return run if calls else silent


def first_result(hook: str, calls: list[Callable[..., Any]]) -> Callable[..., Any]:
    if len(calls) == 1:
        return calls[0]
    candidates = tuple(calls)

    def run(*args: object) -> Any:
        for call in candidates:
            result = call(*args)
            if result is not None:
                return result
        if not candidates:
            raise HookError(
                f"No plug-in implements the action '{hook}'. Attach hocket's default actions, or a plug-in that implements it."
            )
        return None

    return run


def around(
    start: Callable[..., Generator[None, Any, Any]], inner: Callable[..., Any], whose: str
) -> Callable[..., Any]:
    """Wrap ``inner`` in a generator function, with pluggy's semantics of ``wrapper=True``."""

    def wrapped(*args: object) -> Any:
        generator = start(*args)
        try:
            next(generator)
        except StopIteration:
            raise HookError(f"The wrapper of {whose} did not yield. Write `result = yield` once.") from None
        except BaseException as error:
            note(error, whose)
            raise
        try:
            result = inner(*args)
        except BaseException as error:
            try:
                generator.throw(error)
            except StopIteration as stop:
                return stop.value
            generator.close()
            raise HookError(f"The wrapper of {whose} yielded twice.") from error
        try:
            generator.send(result)
        except StopIteration as stop:
            return stop.value
        except BaseException as error:
            note(error, whose)
            raise
        generator.close()
        raise HookError(f"The wrapper of {whose} yielded twice.")

    return wrapped


def noted(function: Callable[..., Any], whose: str) -> Callable[..., Any]:
    if not whose:
        return function

    def noted(*args: object) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            note(error, whose)
            raise

    return noted


def note(error: BaseException, whose: str) -> None:
    if isinstance(error, TypeError | AttributeError):
        from hocket.help import failures  # only needed for error messages

        failures.explain(error, "state")
    note = f"Raised by {whose}."
    if whose and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def origin_of(attachment: Attachment, hook: str) -> str:
    dist = f" of {attachment.dist} {attachment.version}" if attachment.dist else ""
    return f"{attachment.kind.removesuffix('s')} '{attachment.name}'{dist} in {hook}"
