"""hocket's checkpoints under the file names that Composer's Trainer was given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hocket
from hocket.basics.run_folder import is_url


class NamedCheckpoints(hocket.Checkpoints):
    """Write checkpoints as `hocket.Checkpoints` does, and link to them by Composer's names, such as ``ep1-ba10-rank0.pt``.

    A checkpoint is a folder; the links are relative. Only folders of this machine get links, not those of URLs.

    Args:
        filename: of a checkpoint, with the placeholders of `named`.
        latest: of the newest one; None for none.
        options: of `hocket.Checkpoints`.
    """

    def __init__(self, folder: str | Path, filename: str, latest: str | None, **options: Any) -> None:
        super().__init__(folder, **options)
        self._folder = None if is_url(folder) else Path(folder)
        self._filename, self._latest = filename, latest
        #: The checkpoints that have links, by the path of the link.
        self.linked: dict[str, str] = {}

    def batch_checkpoint(self, state: hocket.State) -> None:
        """Write a checkpoint if one is due, and link to it."""
        super().batch_checkpoint(state)
        self._link(state)

    def epoch_checkpoint(self, state: hocket.State) -> None:
        """Write a checkpoint if one is due, and link to it."""
        super().epoch_checkpoint(state)
        self._link(state)

    def after_fit(self, state: hocket.State) -> None:
        """Write the last checkpoint, and link to it."""
        super().after_fit(state)
        self._link(state)

    def _link(self, state: hocket.State) -> None:
        folder, now = self._folder, state.timestamp
        if folder is None or state.strategy.rank != 0:
            return
        target = folder / f"ep{now.epoch}-ba{now.batch}"
        names = [named(self._filename, state), *([] if self._latest is None else [named(self._latest, state)])]
        if not target.is_dir() or str(folder / names[0]) in self.linked:
            return
        for name in names:
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if link != target:
                temporary = link.with_name(f".{link.name}.new")
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(os.path.relpath(target, link.parent))
                temporary.replace(link)
        self.linked[str(folder / names[0])] = target.name
        for link_, kept in list(self.linked.items()):
            if not (folder / kept).is_dir():  # removed, as one of more than were to be kept
                Path(link_).unlink(missing_ok=True)
                del self.linked[link_]


def named(template: str, state: hocket.State) -> str:
    """Return a name with Composer's placeholders replaced: ``{run_name}``, ``{epoch}``, ``{batch}``, ``{rank}`` and others.

    Unknown placeholders stay. The rank is 0: one checkpoint holds the state of all ranks.
    """
    now = state.timestamp
    seconds = {"total_wct": now.seconds, "epoch_wct": now.epoch_seconds, "batch_wct": now.batch_seconds}
    counts = ("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
    values = {name: getattr(now, name) for name in counts} | seconds
    return filled(template, {**values, "run_name": state.run_name})


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Replace placeholders by values, and those of ranks by those of rank 0; unknown ones stay."""
    ranks = {"rank": 0, "local_rank": 0, "node_rank": 0}
    for name, value in {**ranks, **values}.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template
