"""Around a run: find a learning rate, export, compress, fine-tune, judge and reproduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_tools.tuning.batch_size_finder import BatchSize as BatchSize
    from hocket_tools.tuning.lr_finder import LearningRate as LearningRate, LearningRates as LearningRates
    from hocket_tools.tuning.tune import tune as tune

__getattr__, __dir__ = lazy(__name__)
