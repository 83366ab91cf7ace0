"""Composer's engine, which hocket does not have."""

from __future__ import annotations

from typing import Any


class Engine:
    """Refuses to be made: hocket's bus calls plug-ins. A Trainer of this package runs algorithms, callbacks and loggers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "hocket has no Engine: its bus calls algorithms, callbacks and loggers. Give them to the Trainer; to call an event "
            "of them alone, write trainer.hocket.state.bus.batch_end(trainer.hocket.state)."
        )
