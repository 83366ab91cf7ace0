"""Explain exceptions of the user's model and loss, and check arguments and first loss of a fit, if insight is installed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress

from hocket.help.optional_packages import ask


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


def _checks(module: str, *facts: object) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] | None = ask(f"{module}.checked", *facts)
    return context or nullcontext()
