"""Experiment loggers. Names are imported when they are first used, and a logger's library when the logger is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_loggers.artifacts import ArtifactsLogger as ArtifactsLogger
    from hocket_loggers.comet import CometLogger as CometLogger
    from hocket_loggers.csv import CSVLogger as CSVLogger
    from hocket_loggers.mlflow import MLflowLogger as MLflowLogger
    from hocket_loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from hocket_loggers.trackio import TrackioLogger as TrackioLogger
    from hocket_loggers.wandb import WandbLogger as WandbLogger
    from hocket_loggers.webhook import WebhookLogger as WebhookLogger

__getattr__, __dir__ = lazy(__name__)
