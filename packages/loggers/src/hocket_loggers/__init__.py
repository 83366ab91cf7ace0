"""Experiment loggers. Names are imported when they are first used, and a logger's library when the logger is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket_loggers.tensorboard import TensorBoardLogger

#: Public name -> the module that defines it.
_PUBLIC = {"TensorBoardLogger": "tensorboard"}

__all__ = ["TensorBoardLogger"]

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
