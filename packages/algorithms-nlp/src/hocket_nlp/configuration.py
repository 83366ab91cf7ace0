"""The configuration of a transformers model, which several models may share."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def own_configuration(model: nn.Module, shared: Any) -> Any:
    """Give all modules of ``model`` with this configuration a copy of it, and return the copy.

    Other models that were made from the same configuration keep theirs.
    """
    own = copy.deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
    return own
