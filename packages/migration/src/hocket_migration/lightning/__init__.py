"""Projects of Lightning, run by hocket: change ``from lightning import Trainer`` to this package. Names are imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_migration.lightning.task import LightningTask
    from hocket_migration.lightning.trainer import Trainer

#: Public name -> the module that defines it.
_PUBLIC = {"LightningTask": "task", "Trainer": "trainer"}

__all__ = ["LightningTask", "Trainer"]

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
