"""Values logged with a reduction whose interval or epoch is in progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.state.component import Check, Component, PerRank, Saved, Tree
from hocket.state.state import State


class LoggedValues(Component):
    """What each rank has collected; with another number of ranks each part is added to that of one."""

    path, scope = "aggregates", "rank"

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self, gather: bool) -> Tree:
        """Return this rank's part."""
        return self._state.aggregates.state_dict()

    def absent(self, checkpoint: Saved) -> Check:
        """Accept older checkpoints, which have none."""
        return Check()

    def load_state_dict(self, saved: PerRank) -> None:
        """Take the parts of this rank's data. Ranks that computed on the same data have saved it several times."""
        by_data: dict[int, Mapping[str, Any]] = {}
        for each in saved.states:
            if each is not None:
                by_data.setdefault(each["data_rank"], each)
        parts, strategy = [by_data[rank] for rank in sorted(by_data)], self._state.strategy
        self._state.aggregates.agreed = any(each["agreed"] or each["interval"] or each["epoch"] for each in parts)
        modules = [path for each in parts for path in each.get("modules", ())]
        self._state.aggregates.load_state_dicts(parts[strategy.data_rank :: strategy.data_ranks], modules)
