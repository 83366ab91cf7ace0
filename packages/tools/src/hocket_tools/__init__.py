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

__getattr__, __dir__ = lazy(__name__)
