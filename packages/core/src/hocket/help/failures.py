"""Explain exceptions of the user's model and loss, and check the first loss of a fit, if the package insight is installed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress

from hocket.help import elsewhere


def explain(error: BaseException, place: str, *facts: object) -> None:
    """Add a note to an exception that was raised in the user's code. Never raises.

    Args:
        place: a key of `hocket_insight.failures.explaining.PLACES`.
        facts: what the function of this place takes besides the exception.
    """
    with suppress(Exception):
        elsewhere.module("hocket_insight.failures.explaining").explain(error, place, *facts)


def first_loss_checked(state: object) -> AbstractContextManager[None]:
    """Return a context in which the first loss is checked for mistakes that raise nothing; ``state`` is that of the run."""
    try:
        return elsewhere.module("hocket_insight.first_loss").watched(state)  # type: ignore[no-any-return]
    except elsewhere.NotInstalled:
        return nullcontext()
