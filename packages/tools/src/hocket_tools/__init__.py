"""Around a run: find a learning rate, export, compress, fine-tune, judge and reproduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_tools.compression.channels import (
        ChannelPruning as ChannelPruning,
        PrunedLayer as PrunedLayer,
        prune_channels as prune_channels,
    )
    from hocket_tools.compression.comparison import Row as Row, compare_compressed as compare_compressed
    from hocket_tools.compression.pruning import Pruning as Pruning, magnitude_masks as magnitude_masks
    from hocket_tools.compression.quantization import quantize as quantize
    from hocket_tools.compression.quantization_aware_training import (
        QuantizationAwareTraining as QuantizationAwareTraining,
        fake_quantize as fake_quantize,
    )
    from hocket_tools.exporting.exporter import Exported as Exported, export as export
    from hocket_tools.finetuning.adapters import Adapters as Adapters, merge_adapters as merge_adapters
    from hocket_tools.finetuning.algorithm import Finetuning as Finetuning
    from hocket_tools.judging.corruptions import CORRUPTIONS as CORRUPTIONS, corrupt as corrupt
    from hocket_tools.judging.judgement import (
        How as How,
        Judgement as Judgement,
        compared as compared,
        judge as judge,
        withstand as withstand,
    )
    from hocket_tools.judging.paired import Difference as Difference, mcnemar as mcnemar, paired_test as paired_test
    from hocket_tools.judging.predictions import Predictions as Predictions, read_predictions as read_predictions
    from hocket_tools.judging.streaming import predict_into as predict_into
    from hocket_tools.reproducing.journal import Journal as Journal, RepetitionDiffers as RepetitionDiffers
    from hocket_tools.resampling import Estimate as Estimate, Statistic as Statistic, bootstrap as bootstrap
    from hocket_tools.tuning.batch_size_finder import BatchSize as BatchSize
    from hocket_tools.tuning.lr_finder import LearningRate as LearningRate, LearningRates as LearningRates
    from hocket_tools.tuning.tune import tune as tune

__getattr__, __dir__ = lazy(__name__)
