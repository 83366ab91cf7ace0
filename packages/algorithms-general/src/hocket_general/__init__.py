"""Training methods for any model. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.lazy import lazy

if TYPE_CHECKING:
    from hocket_general import functional
    from hocket_general.ema import EMA
    from hocket_general.gradient_clipping import GradientClipping
    from hocket_general.label_smoothing import LabelSmoothing
    from hocket_general.sam import SAM

#: Public name -> the module that defines it; a module stands for itself.
_PUBLIC = {
    "EMA": "ema",
    "GradientClipping": "gradient_clipping",
    "LabelSmoothing": "label_smoothing",
    "SAM": "sam",
    "functional": "",
}

__all__ = ["EMA", "SAM", "GradientClipping", "LabelSmoothing", "functional"]

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
