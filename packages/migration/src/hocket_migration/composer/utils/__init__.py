"""What projects use of Composer's ``composer.utils``."""

from __future__ import annotations

from hocket.lazy import lazy

_PUBLIC = {
    **dict.fromkeys(("dist", "module_surgery", "reproducibility"), ""),
    **dict.fromkeys(("batch_get", "batch_set", "ensure_tuple", "get_device", "model_eval_mode"), "helpers"),
}

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
