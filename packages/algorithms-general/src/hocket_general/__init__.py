"""Training methods for any model. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket_general import functional
    from hocket_general.ema import EMA
    from hocket_general.gradient_clipping import GradientClipping
    from hocket_general.label_smoothing import LabelSmoothing
    from hocket_general.sam import SAM

#: Public name -> the module that defines it.
_PUBLIC = {
    "EMA": "hocket_general.ema",
    "GradientClipping": "hocket_general.gradient_clipping",
    "LabelSmoothing": "hocket_general.label_smoothing",
    "SAM": "hocket_general.sam",
}

__all__ = ["EMA", "SAM", "GradientClipping", "LabelSmoothing", "functional"]


def __getattr__(name: str) -> Any:
    if name == "functional":
        return importlib.import_module("hocket_general.functional")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hocket_general' has no attribute '{name}'; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
