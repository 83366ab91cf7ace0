"""``duration=["10ep", "2h"]``: stop at whichever comes first."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.basics.time import Time, Unit
from hocket.data.errors import DataError
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.callback import Callback
from hocket.loop.fit_duration import first_reached
from hocket.state.requests import Decision
from hocket.state.state import State


class Limits(Callback):
    """Request a stop when one of the Trainer's durations after the first is over, in fits without a duration of their own.

    Args:
        limits: counted from the beginning of training.
    """

    def __init__(self, limits: Sequence[Time]) -> None:
        self._limits = limits

    def attachment(self) -> Attachment:
        """Return it as an attached plug-in."""
        return Attachment("callbacks", "duration", self)

    def batch_end(self, state: State) -> None:
        """Stop if a limit is reached."""
        if state.progress.fit_asked is not None or Decision.STOP in state.requests.pending:
            return
        if (reached := first_reached(self._limits, state)) is not None:
            state.request(Decision.STOP, f"{reached} are over")

    def epoch_end(self, state: State) -> None:
        """Stop if a limit is reached. Raises DataError for a limit in tokens if no batch counts tokens."""
        now = state.timestamp
        if now.batch and not now.token and any(limit.unit is Unit.TOKEN for limit in self._limits):
            raise DataError(
                f"No tokens were counted in {now.batch} batches, so a duration in tok never ends. Give it in ba, sp or ep, or "
                "use a hocket.Task whose count(batch) returns (samples, tokens)."
            )
        self.batch_end(state)
