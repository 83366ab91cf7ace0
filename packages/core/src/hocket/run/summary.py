"""The state of a run for people: the result, a few lines about the Trainer, and the last lines of a fit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.basics.display import position
from hocket.help import attributes, optional_packages
from hocket.loop.agreement import ranks_of
from hocket.run.result import Cost, Result

if TYPE_CHECKING:
    from hocket.checkpoints import Checkpoints
    from hocket.plugins.plan import Plan
    from hocket.state.state import State


def result(state: State, checkpoints: Checkpoints | None) -> Result:
    """Return the result so far. Every rank has to call it."""
    names: Sequence[str] = ()
    best = None
    if checkpoints is not None:
        names, best = checkpoints.store.names(), ranks_of(state).first(checkpoints.listing.best)
    return Result(
        metrics=attributes.Values({**dict(state.history.latest("train/")), **state.metrics}),
        timestamp=state.timestamp.copy(),
        run_folder=state.folder.path,
        stop_reason=state.stop_reason,
        costs={key: Cost(int(calls), *seconds) for key, (calls, *seconds) in state.bus.account.items()},
        checkpoints=names,
        history=state.history.table(),
        best=best,
    )


def of_trainer(state: State, plan: Plan, checkpoints: Checkpoints | None) -> tuple[str, dict[str, str]]:
    """Return a title and rows of text."""
    from hocket.basics.masking import masked

    rows = {name: plan.run[name] for name in ("model", "duration")} | {"device": str(state.device)}
    for plugin in state.bus.attachments:
        if plugin.kind != "actions":
            rows[plugin.kind] = f"{rows[plugin.kind]}, {plugin.name}" if plugin.kind in rows else plugin.name
    if checkpoints is not None:
        rows["checkpoints"] = masked(str(checkpoints.store.folder))
    rows["run folder"] = str(state.folder.path)
    return f"Trainer after {position(state.timestamp)}", rows


def show(state: State, checkpoints: Checkpoints | None, command: Sequence[str] | None, interrupted: bool) -> None:
    """Show the last lines of a fit; see `hocket_insight.last_lines`."""
    if _shows(state, command):
        lines = optional_packages.ask("last_lines.last_lines", state, checkpoints, command, interrupted)
        show_lines(state, lines or ())


def show_resumed(state: State, command: Sequence[str] | None) -> None:
    """Show where a resumed run continues, before its first fit."""
    where, state.identity.resumed_from = state.identity.resumed_from, None
    if where is not None and _shows(state, command):
        show_lines(state, [f"resumed from {where}, at ep {state.timestamp.epoch} ba {state.timestamp.batch}"])


def _shows(state: State, command: Sequence[str] | None) -> bool:
    return state.strategy.rank == 0 and bool(command or state.bus.listeners("log_summary"))


def show_lines(state: State, lines: Sequence[str]) -> None:
    """Pass lines to the loggers that show them, or print them if there is none."""
    from hocket.basics.masking import masked

    lines = [masked(line) for line in lines]  # URLs of checkpoints
    if state.bus.listeners("log_summary"):
        state.bus.log_summary(state, lines)
    else:
        for line in lines:
            print(f"hocket: {line}", file=sys.stderr, flush=True)
