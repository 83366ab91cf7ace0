"""Explain exceptions of the user's model and loss, and check arguments and first loss of a fit, if insight is installed."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from hocket.help import optional_packages, warn


def ask(function: str, *facts: object) -> Any:
    """Return what a function of hocket-insight, such as ``failures.calls.unknown``, returns; None if it is not installed."""
    module, _, name = function.rpartition(".")
    try:
        part = optional_packages.module(f"hocket_insight.{module}")
    except optional_packages.NotInstalled:
        return None
    return getattr(part, name)(*facts)


def explain(error: BaseException, place: str, *facts: object) -> None:
    """Add a note to an exception that was raised in the user's code. Never raises.

    Args:
        place: a key of `hocket_insight.failures.explaining.PLACES`.
        facts: what the function of this place takes besides the exception.
    """
    with suppress(Exception):
        ask("failures.explaining.explain", error, place, *facts)


def first_loss_checked(state: object) -> AbstractContextManager[None]:
    """Return a context in which the first loss is checked for mistakes that raise nothing; ``state`` is that of the run."""
    return _checks("first_loss", state)


def first_step_checked(state: object, function: str, caller: str, unnamed: list[str]) -> AbstractContextManager[None]:
    """Return a context around the first step of a loss function; see `hocket_insight.first_step`."""
    return _checks("first_step", state, function, caller, unnamed)


def arguments_checked(state: object, settings: object) -> AbstractContextManager[None]:
    """Return a context around a fit which warns of arguments without effect; ``settings`` are the Trainer's."""
    return _checks("fit_arguments", state, settings)


def warn_of_uncalled(cls: type, base: type, events: Collection[str] = ()) -> None:
    """Warn of methods of a class that nobody calls; see `hocket_insight.failures.uncalled`."""
    if text := ask("failures.uncalled.uncalled", cls, base, events):
        warn(text)


def check_scheduler(scheduler: object, state: object, by_default: bool) -> None:
    """Compare the lengths of a torch scheduler with the run's; see `hocket_insight.scheduler_lengths`."""
    ask("scheduler_lengths.check", scheduler, state, by_default)


def warn_of_state(data: object) -> None:
    """Warn of data whose state does not say all; see `hocket_insight.data_states`."""
    ask("data_states.warn_of", data)


def _checks(module: str, *facts: object) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] | None = ask(f"{module}.checked", *facts)
    return context or nullcontext()
