"""Composer's engine, which hocket does not have."""

from __future__ import annotations

from hocket_migration.composer.plugin_factory import no_counterpart

Engine = no_counterpart(
    "Engine",
    "Its bus calls algorithms, callbacks and loggers. Give them to the Trainer; to call an event of them alone, write "
    "trainer.hocket.state.bus.batch_end(trainer.hocket.state).",
)
